import pytest

from research import experiment
from research.config import ConfigError, base_config


def test_misspelled_name_fails_with_the_nearest():
    with pytest.raises(ConfigError, match=r"config\.attention\.blok_q: no such field.*attention\.block_q\b"):
        experiment.override(base_config(), {"attention.blok_q": 128})
    with pytest.raises(ConfigError, match=r"config\.atention\.window: .*attention\.window\b"):
        experiment.override(base_config(), {"atention.window": 128})


def test_group_cannot_be_replaced():
    with pytest.raises(ConfigError, match=r"config\.wandb: is a group.*wandb\.mode, wandb\.project"):
        experiment.override(base_config(), {"wandb": {"mode": "offline"}})


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
        experiment.override(base_config(), {name: setting})


def test_overrides_arrive():
    config = base_config()
    experiment.override(config, {"model.layers": ("hca",), "optimizer.learning_rate": 1, "seed": 3})
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
