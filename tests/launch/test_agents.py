"""Sweep files, and the command lines that wandb's own agent makes of them."""

import importlib.util
import json
import os
import pathlib
import queue
import re
import subprocess
import sys

import jsonschema
import pytest
import yaml
from absl import flags as absl_flags
from ml_collections import config_flags
from wandb import wandb_agent
from wandb.sdk.launch.sweeps import utils as sweep_utils

from launch import line
from research.errors import ConfigError
from research.settings import fields
from research.sweeps import agents, experiment, sweep
from tests import tiny
from tests.experiments.test_experiments import CASES, MODULES, platform
from tests.launch import loopback
from tests.launch.conftest import descendants, is_alive, wait_for

ROOT = pathlib.Path(__file__).parents[2]
TINY = "tests/tiny.py"


@pytest.fixture(autouse=True)
def root(monkeypatch, tmp_path):
    """Agents are started in the repository's root; what they set in the environment is taken back."""
    monkeypatch.chdir(ROOT)
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")


def described(target, common, where="cpu", mode="offline"):
    settings = tiny.get_config().wandb
    settings.mode = mode
    return agents.describe(target, common, sweep.plan(target, common, where, fresh=True), settings)


def through_yaml(description, tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(description))
    return sweep_utils.load_sweep_config(str(path))


def agent(description):
    made = wandb_agent.Agent(api=None, queue=queue.Queue(), sweep_id="sweep1")
    made._sweep_command = description["command"]
    return made


def start(made, description, parameters, run_id="run1"):
    """What the agent does when the server sends it a run."""
    response = made._process_command(
        {
            "type": "run",
            "run_id": run_id,
            "program": description["program"],
            "args": {name: {"value": value} for name, value in parameters.items()},
        }
    )
    assert "exception" not in response, response


def expanded(description, parameters, monkeypatch):
    """The agent's command line."""
    commands = []
    with monkeypatch.context() as patch:
        patch.setattr(wandb_agent, "AgentProcess", lambda command, **_: commands.append(command) or agent(description))
        start(agent(description), description, parameters)
    return commands[0]


def parsed(command):
    """The config that `launch/train.py` makes of a command line, and its overrides."""
    arguments = line.canonical(line.read(command[3:]), takes_point=True)
    values = absl_flags.FlagValues()
    argv = ["train.py", *arguments]
    holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    assert values(argv) == ["train.py"]
    return holder.value, config_flags.get_override_values(values["config"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the load_module")
# What is only compiled ahead of time holds points that no run could have.
@pytest.mark.parametrize(
    ("name", "arg"),
    [
        pytest.param(name, arg, marks=() if arg else pytest.mark.slow)
        for name, arg in CASES
        if "aot" not in getattr(MODULES[name], "REPORTS", {})
    ],
)
def test_agents_run_the_points_of_the_sweep(name, arg, tmp_path, monkeypatch):
    target, common = f"experiments/{name}.py:{arg}", {"seed": 3, "wandb.project": "some where, (here)"}
    if any(point.after for point in experiment.points(target)):
        with pytest.raises(ConfigError, match="wandb's agents keep no order"):
            described(target, common, platform(arg))
        common["train.start_from"] = ""  # the points that are after none
    module, _ = experiment.load(target)
    description = through_yaml(described(target, common, platform(arg)), tmp_path)
    labels = description["parameters"]["point"]["values"]
    points = experiment.points(target, common)
    assert len(labels) == len(points) > 1
    for label, overrides in zip(labels, (point.overrides for point in points), strict=True):
        command = expanded(description, {"point": label}, monkeypatch)
        interpreter = str(pathlib.Path(command[1]).absolute())  # written as one would type it in the working folder
        assert [command[0], interpreter, command[2]] == ["/usr/bin/env", sys.executable, "launch/train.py"]
        config, recorded = parsed(command)
        expected = module.get_config(arg)
        fields.override(expected, common | overrides)
        assert config.to_dict() == expected.to_dict()
        assert recorded == common | overrides


def test_schema_of_sweep_files_is_kept(tmp_path):
    found = importlib.util.find_spec("sweeps")
    if found is None:
        pytest.skip("the schema is not here: pip install --no-deps -r requirements-schema.txt")
    schema = json.loads((pathlib.Path(found.origin).parent / "config" / "schema.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    validator.check_schema(schema)
    description = through_yaml(described(TINY, {}), tmp_path)
    assert not list(validator.iter_errors(description))
    assert list(validator.iter_errors(description | {"method": "all"}))
    assert list(validator.iter_errors(description | {"parameters": {"point": {"values": "x"}}}))


@pytest.mark.filterwarnings("ignore:the load_module")
@pytest.mark.parametrize(
    ("name", "written", "expected"),
    [
        ("attention.sinks", "false", False),
        ("attention.sinks", "true", True),
        ("attention.block_q", "0", 0),
        ("attention.backend", "blockwise", "blockwise"),
        ("optimizer.learning_rate", "1.0e-3", 1e-3),
        ("optimizer.learning_rate", "1e-3", 1e-3),  # a word, says YAML
        ("optimizer.learning_rate", "1", 1.0),
        ("optimizer.weight_decay", "0", 0.0),
        ("model.layers", "('hca', 'csa')", ("hca", "csa")),
        ("model.layers", "[hca, csa]", ("hca", "csa")),
        ("model.layers", "('csa',)", ("csa",)),
        ("data.path", "/some where/a=b,c.txt", "/some where/a=b,c.txt"),
        ("run.id", "''", ""),
    ],
)
def test_parameters_added_by_hand_arrive(name, written, expected, monkeypatch):
    parameters = yaml.safe_load(f"config.{name}:\n  values:\n  - {written}")
    given = {parameter: choice["values"][0] for parameter, choice in parameters.items()}
    config, recorded = parsed(expanded(described(TINY, {}), given, monkeypatch))
    assert recorded == {name: expected}
    assert type(recorded[name]) is type(expected)
    assert fields.value(config, name) == expected


def test_parameter_that_the_point_sets_is_refused(monkeypatch):
    given = {"point": "learning_rate=0.001", "config.optimizer.learning_rate": 0.1}
    with pytest.raises(ConfigError, match=r"learning_rate=0\.1: must be 0\.001, as the point learning_rate=0\.001"):
        parsed(expanded(described(TINY, {}), given, monkeypatch))


def test_group_of_parameters_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"config\.attention: is a group"):
        parsed(expanded(described(TINY, {}), {"config.attention": {"top_k": 3}}, monkeypatch))


def test_point_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no such point; the nearest are learning_rate=0\.001"):
        experiment.point(TINY, "learning_rate=0.01")


def test_runs_without_wandb_are_refused():
    with pytest.raises(ConfigError, match=r"config\.wandb\.mode=disabled: must be auto, online or offline"):
        described(TINY, {}, mode="disabled")


@pytest.mark.slow
def test_run_of_an_agent_is_wandbs_run_and_knows_its_parameters(tmp_path):
    """Real training by a real agent. Wandb's search looks for a run's parameters in its config, under their names."""
    common = {"run.root": str(tmp_path / "runs"), "wandb.mode": "offline", "train.steps": 3}
    description = described(TINY, common)
    made = agent(description)
    for _ in range(2):  # the second time it resumes: the agent was stopped, say, and sends the run again
        start(made, description, {"point": "learning_rate=0.001", "config.seed": 5}, "abcd1234")
        assert made._run_processes["abcd1234"].wait(timeout=300) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "sweep1-abcd1234-tiny-steps=3,seed=5,learning_rate=0.001"
    assert (folder / "wandb_id").read_text() == "abcd1234"
    (record,) = (folder / "wandb").glob("offline-run-*")
    assert record.name.endswith("-abcd1234")
    written = (record / "run-abcd1234.wandb").read_bytes()
    for key in (b"point", b"config.seed", b"sweep1"):
        assert key in written


@pytest.mark.slow
def test_stopped_agent_lets_its_run_save_and_leaves_nothing_behind(tmp_path, monkeypatch):
    """The commands as they are printed, and a server on this machine: register, start an agent, stop it."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with loopback.Server("sweep1", "compressed-attention", "a-team", [{"point": "learning_rate=0.001"}]) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        overrides = {"run.root": tmp_path / "runs", "train.steps": 10**6, "wandb.mode": "offline"}
        arguments = [f"--config.{name}={value}" for name, value in overrides.items()]
        command = [sys.executable, "launch/sweep.py", f"--config={TINY}", "--to=wandb", "--create", *arguments]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        started = printed.splitlines()[-1].removeprefix("next: ")
        assert started == "wandb agent --forward-signals a-team/compressed-attention/sweep1"
        process = subprocess.Popen(
            [sys.executable, "-m", *started.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        (metrics,) = wait_for(lambda: [*tmp_path.glob("runs/*-run0-*/metrics.jsonl")])
        wait_for(metrics.read_text)
        all_of_it = descendants(process.pid)
        process.terminate()
        said, _ = process.communicate(timeout=120)
    summary = json.loads((metrics.parent / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    saved = re.match(r"SIGTERM after step (\d+) of 1000000, which is saved", summary["message"])
    assert (metrics.parent / "checkpoints" / saved[1]).is_dir()
    assert f"interrupted: {summary['message']}" in said
    assert all_of_it
    wait_for(lambda: not any(map(is_alive, all_of_it)))  # wandb's own process ends a moment later


@pytest.mark.slow
def test_sweep_file_from_the_command_line(tmp_path):
    """It is written, and only who is logged in can register it."""
    command = [sys.executable, "launch/sweep.py", f"--config={TINY}", "--to=wandb", "--config.wandb.mode=offline"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run(
        [*command, f"--config.run.root={tmp_path}", "--create"],
        env=inherited | {"JAX_PLATFORMS": "cpu", "NETRC": str(tmp_path / "no-such-file"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "invalid config: --create: not logged in to wandb; run `wandb login` first, or leave --create out\n",
    )
    description = yaml.safe_load((tmp_path / "tiny" / "sweep.yaml").read_text())
    assert description["parameters"]["point"]["values"] == ["learning_rate=0.001", "learning_rate=1e+30"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to=wandb", "--parallel=2"], "--parallel: has no effect with --to=wandb, only with --to=here, --to=slurm"),
        (["--job=timeout_min=3"], "--job: has no effect with --to=here, only with --to=slurm"),
        (["--create"], "--create: has no effect with --to=here, only with --to=wandb"),
    ],
)
def test_flags_without_effect_are_refused(arguments, message):
    command = [sys.executable, "launch/sweep.py", f"--config={TINY}", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"invalid config: {message}\n")
