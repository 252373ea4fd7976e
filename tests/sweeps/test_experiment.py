import re

import pytest

from research.errors import ConfigError
from research.settings import fields
from research.settings.config import base_config
from research.sweeps import experiment
from tests import tiny


def test_misspelled_name_fails_with_the_nearest():
    with pytest.raises(ConfigError, match=r"config\.attention\.blok_q: no such field.*attention\.block_q\b"):
        fields.override(base_config(), {"attention.blok_q": 128})
    with pytest.raises(ConfigError, match=r"config\.atention\.window: .*attention\.window\b"):
        fields.override(base_config(), {"atention.window": 128})


def test_group_cannot_be_replaced():
    with pytest.raises(ConfigError, match=r"config\.wandb: is a group.*wandb\.mode, wandb\.project"):
        fields.override(base_config(), {"wandb": {"mode": "offline"}})


@pytest.mark.parametrize(
    ("name", "setting", "expected"),
    [
        ("attention.block_q", 1.5, "int"),
        ("attention.block_q", True, "int"),
        ("attention.block_q", None, "int"),
        ("attention.sinks", 1, "bool"),
        ("attention.backend", None, "str"),
        ("model.layers", ["hca"], "tuple"),
    ],
)
def test_value_of_another_type_is_refused(name, setting, expected):
    with pytest.raises(ConfigError, match=rf"config\.{name}=.*must be of type {expected}"):
        fields.override(base_config(), {name: setting})


def test_overrides_arrive():
    config = base_config()
    fields.override(config, {"model.layers": ("hca",), "optimizer.learning_rate": 1, "seed": 3})
    assert (config.model.layers, config.optimizer.learning_rate, config.seed) == (("hca",), 1.0, 3)


def test_labels_are_short_unambiguous_and_fit_for_a_folder():
    assert experiment.label({"model.layers": ("csa", "hca"), "attention.block_q": 128}) == "layers=csa+hca,block_q=128"
    assert experiment.label({"a.width": 1, "b.width": 2}) == "a.width=1,b.width=2"
    assert experiment.label({"run.root": "elsewhere", "seed": 1, "wandb.mode": "disabled"}) == "seed=1"
    assert "/" not in experiment.label({"data.path": "/tmp/text"})
    long = [experiment.label({"data.path": "x" * 500 + end}) for end in "ab"]
    assert len(set(long)) == 2
    assert max(map(len, long)) < 200


@pytest.mark.parametrize("target", ["experiments/nothing.py", "research/config.py:demo"])
def test_file_that_is_no_experiment_is_refused(target):
    with pytest.raises(ConfigError, match=target.split(":")[0]):
        experiment.load(target)


GRID = "tests/points.py:grid"


def labels(common):
    return [point.label for point in experiment.points(GRID, common)]


def test_override_of_a_field_of_the_sweep_narrows_it():
    whole = labels({})
    assert labels({"seed": 7, "wandb.mode": "offline"}) == whole
    assert labels({"attention.backend": "blockwise"}) == whole[1:3]
    assert labels({"attention.backend": "blockwise", "data.seq_len": 128}) == whole[2:3]
    # A point that does not set the field has the config's value of it.
    assert labels({"train.steps": tiny.get_config().train.steps}) == whole[:3]
    assert labels({"train.steps": 4}) == whole[3:]


@pytest.mark.parametrize(
    ("common", "message"),
    [
        ({"data.seq_len": 1024}, r"config\.data\.seq_len=1024: must be 64, 128 or 256, one of the values among"),
        ({"train.steps": 5}, r"config\.train\.steps=5: must be 12 or 4, one of the values among"),
        ({"train.steps": "12"}, r"config\.train\.steps='12': must be of type int"),
        ({"data.seq_len": 128, "train.steps": 4}, r"config\.data\.seq_len=128 and .*\.steps=4: no point .* has them"),
        ({"run.id": "x"}, r"config\.run\.id: is set by the sweep itself"),
        # All points would start from one of them, and that one from itself.
        ({"train.start_from": "backend=blockwise,seq_len=64"}, "is a point of the sweep, so must be after it"),
        ({"train.start_from": "backend=blockwise,seq_len=64@8"}, "is a point of the sweep, so must be after it"),
    ],
)
def test_override_that_no_point_agrees_with_is_refused(common, message):
    with pytest.raises(ConfigError, match=message):
        experiment.points(GRID, common)


EXPERIMENT = """
from research.settings.config import base_config
from research.sweeps.experiment import Point
ARGS, HEADLINE = ("",), ()
def get_config(arg=""):
    return base_config()
def sweep(arg=""):
    return {points}
"""


def written(path, points):
    path.write_text(EXPERIMENT.format(points=points))
    return str(path)


def test_points_are_after_one_or_several(tmp_path):
    points = """[Point({"seed": 3}, after=("seed=1", "seed=2")), Point({"seed": 2}, after="seed=1"), {"seed": 1}]"""
    found = experiment.points(written(tmp_path / "x.py", points))
    assert [point.after for point in found] == [("seed=1", "seed=2"), ("seed=1",), ()]
    # Waiting for one that waits is waiting enough.
    start = """Point({"seed": 3, "train.start_from": "seed=1"}, after="seed=2")"""
    points = f"""[{start}, Point({{"seed": 2}}, after="seed=1"), {{"seed": 1}}]"""
    assert len(experiment.points(written(tmp_path / "y.py", points))) == 3


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            """[{"seed": 1}, Point({"seed": 2}, after="seed=0")]""",
            "seed=2 is after='seed=0'; must be a point, as seed=1",
        ),
        ("""[Point({"seed": 1}, after="seed=1")]""", "seed=1 is after itself"),
        (
            """[Point({"seed": 1}, after="seed=2"), Point({"seed": 2}, after="seed=1")]""",
            "seed=1 is after itself, by after=seed=2",
        ),
        (
            """[{"seed": 1}, {"seed": 2, "train.start_from": "seed=1"}]""",
            "seed=2,start_from=seed=1: config.train.start_from=seed=1: is a point of the sweep, so must be after it",
        ),
        ("""[{"seed": 1}, {"seed": 1, "run.root": "x"}]""", "2 points of the sweep are 'seed=1'; must differ"),
    ],
)
def test_sweep_that_contradicts_itself_is_refused(points, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        experiment.points(written(tmp_path / "x.py", points))
