"""Every point of every experiment can be run, and asks what the project is about."""

import pathlib
import re

import pytest
from absl import flags
from ml_collections import config_flags

from analysis import plot
from research.errors import ConfigError
from research.hardware import topology_chip
from research.settings import fields
from research.settings.config import read
from research.sweeps import cross, experiment
from research.validation import validate

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "experiments").glob("*.py") if path.name != "__init__.py")
MODULES = {path.stem: experiment.load(str(path))[0] for path in FILES}
CASES = [(name, arg) for name, module in MODULES.items() for arg in module.ARGS]


def platform(arg):
    """Without an argument experiments are sized for an accelerator, and so are the published models."""
    return "tpu" if arg in ("", "flash", "pro") else "cpu"


def test_there_are_experiments():
    assert {"mask_strategies", "attention_kinds"} <= set(MODULES)


@pytest.mark.parametrize(("name", "arg"), CASES)
def test_config_and_every_sweep_point_validate(name, arg):
    module = MODULES[name]
    # What is compiled for a GPU is of use there alone.
    gpu = topology_chip(module.get_config(arg).aot.topology).platform == "gpu"
    on = "gpu" if gpu else platform(arg)
    validate(read(module.get_config(arg)), on)
    points = [point.overrides for point in experiment.points(f"{ROOT}/experiments/{name}.py:{arg}")]
    assert len({experiment.label(point) for point in points}) == len(points) > 1
    # What is compiled ahead of time may ask the compiler what does not fit.
    asks_compiler = "aot" in getattr(module, "REPORTS", {})
    for point in points:
        config = module.get_config(arg)
        fields.override(config, point)
        validate(read(config), on, checks_memory=not asks_compiler)


@pytest.mark.filterwarnings("ignore:the load_module")
@pytest.mark.parametrize(("name", "arg"), CASES)
def test_points_arrive_through_the_command_line_unchanged(name, arg):
    module = MODULES[name]
    target = f"{ROOT}/experiments/{name}.py:{arg}"
    for point in (point.overrides for point in experiment.points(target)):
        argv = ["train.py", f"--config={target}", *experiment.as_flags(point)]
        values = flags.FlagValues()
        holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
        values(argv)
        expected = module.get_config(arg)
        fields.override(expected, point)
        assert holder.value.to_dict() == expected.to_dict()


@pytest.mark.parametrize(("name", "arg"), CASES)
def test_sweep_varies_strategy_block_size_and_dq_reduction(name, arg):
    assert MODULES[name].cross is cross  # written there, once
    points = [point.overrides for point in experiment.points(f"{ROOT}/experiments/{name}.py:{arg}")]

    def values(field):
        return {point[field] for point in points if field in point}

    assert {"static", "dynamic"} <= values("attention.schedule")
    assert len(values("attention.block_q")) > 1
    assert len(values("attention.block_kv")) > 1
    assert values("attention.dq_reduction_steps") == {0, 3}


@pytest.mark.parametrize("name", MODULES)
def test_file_says_what_it_asks_and_how_to_run_it(name):
    module = MODULES[name]
    assert module.__doc__.splitlines()[0].endswith("?")
    assert re.search(rf"    python launch/\w+\.py --config=experiments/{name}\.py", module.__doc__)
    assert set(module.HEADLINE) <= set(plot.TITLES)


@pytest.mark.parametrize("name", MODULES)
def test_unknown_argument_is_refused(name):
    for function in (MODULES[name].get_config, MODULES[name].sweep):
        with pytest.raises(ConfigError, match=r"'enormous'.*must be one of '', "):
            function("enormous")
