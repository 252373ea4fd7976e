"""Whatever is typed, the answer is the right run or a line that says what to change: real launchers and processes."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TINY = f"--config={ROOT}/tests/tiny.py"
WITH_CONFIG = ("train", "sweep", "bench", "aot", "masks")
LAUNCHERS = (*WITH_CONFIG, "selection", "peers", "report", "import_weights", "export_weights")
EXPERIMENTS = sorted(path.name for path in (ROOT / "experiments").glob("[!_]*.py"))
NOBODY = {"NETRC": "/no/such/file", "WANDB_API_KEY": "", "HOME": "/no/such/home"}  # logged in nowhere


def start(launcher, *arguments, cwd, **environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return subprocess.Popen(
        [sys.executable, ROOT / "launch" / f"{launcher}.py", *arguments],
        env=inherited | {"JAX_PLATFORMS": "cpu"} | environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(launcher, *arguments, cwd, **environment):
    process = start(launcher, *arguments, cwd=cwd, **environment)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def refused(launcher, *arguments, cwd, **environment):
    """The one line; nothing may be left."""
    code, out, err = run(launcher, *arguments, cwd=cwd, **environment)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1, err
    assert list(cwd.glob("runs*")) == []
    return err.rstrip()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_without_arguments_it_shows_an_example(launcher, tmp_path):
    code, out, err = run(launcher, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert re.match(rf"usage: python .*launch/{launcher}.py (FOLDER |ID FOLDER )?(--config=|\[--FLAG)", err)
    assert re.search(rf"(python launch/{launcher}.py (--|FOLDER|ID)|make {launcher})", err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("launcher", "flag"), [*((launcher, "--help") for launcher in LAUNCHERS), ("train", "-h")])
def test_help_shows_flags_experiments_and_fields(launcher, flag, tmp_path):
    code, out, err = run(launcher, flag, cwd=tmp_path, COLUMNS="160")
    assert (code, err) == (0, "")
    assert f"usage: python {ROOT}/launch/{launcher}.py" in out
    if launcher not in WITH_CONFIG:
        assert "Fields of the config" not in out
        return
    for told in ("--config", "--preset", "--config.attention.block_q", "queries per block", "--config.seed"):
        assert told in out
    for name in EXPERIMENTS:
        assert f"experiments/{name}" in out
        assert f"experiments/{name}:demo" in out
    assert "AdamW" in out  # groups are told apart
    assert re.search(r"--config\.optimizer\.learning_rate +0\.003 +after the warm-up; positive", out)


def test_help_shows_what_an_experiment_sets(tmp_path):
    _, out, _ = run("train", TINY, "--help", cwd=tmp_path, COLUMNS="160")
    assert re.search(r"--config\.data\.seq_len +512 +tokens of a row; positive +64", out)


TRAIN = [
    (("--config=nothing.py",), "--config=nothing.py: no file 'nothing.py'; must be experiments/NAME.py"),
    (("--config",), "--config=: no file ''; must be experiments/NAME.py"),
    (("--config.seed=1",), "--config.seed: has no effect without --config"),
    (("--dry_run",), "--config: is missing; must be experiments/NAME.py or experiments/NAME.py:ARG"),
    ((f"{TINY}:huge",), "argument 'huge' after the colon: must be one of ''"),
    ((TINY, "--train.steps=3"), "--train.steps: no such flag; fields are written --config.train.steps=3"),
    ((TINY, "--step=3"), "--step: no such flag; --help shows all"),
    ((TINY, "--dry-run"), "--dry-run: no such flag; did you mean --dry_run?"),
    ((TINY, "--config.train.step=3"), "config.train.step: no such field; the nearest are train.steps"),
    ((TINY, "--config.train=3"), "config.train: is a group and cannot be replaced as a whole"),
    ((TINY, "--config.train.steps=three"), "config.train.steps='three': must be an integer"),
    ((TINY, "--config.train.steps="), "config.train.steps='': must be an integer"),
    ((TINY, "--config.train.steps"), "config.train.steps='': must be an integer"),
    ((TINY, "--noconfig.train.steps"), "--noconfig.train.steps: config.train.steps is no switch"),
    ((TINY, "--config.optimizer.learning_rate=high"), "config.optimizer.learning_rate='high': must be a number"),
    ((TINY, "--config.optimizer.weight_decay=nan"), "config.optimizer.weight_decay=nan: must be finite and 0 or more"),
    ((TINY, "--config.rope.theta=inf"), "config.rope.theta=inf: must be finite and positive"),
    ((TINY, "--config.model.layers=hca,abc"), "config.model.layers=('hca', 'abc'): must be"),
    ((TINY, "--config.model.dtype=float16"), "config.model.dtype='float16': must be one of float32, bfloat16"),
    ((TINY, "--config.run.id=../x"), "config.run.id='../x': must be a relative path"),
    ((TINY, "--config.attention.top_k=3"), "config.attention.top_k=3: must be left at 64: model.layers has no csa"),
    ((TINY, "--config.rope.yarn_beta_fast=3"), "config.rope.yarn_beta_fast=3.0: must be left at 32.0"),
    ((TINY, "steps=3"), "steps=3: unexpected; overrides are written --config.group.field=value"),
    ((TINY, "--", "--config.seed=1"), "--: unexpected; overrides are written --config.group.field=value"),
    ((TINY, "--flagfile=nothing"), "--flagfile: "),
    ((TINY, "--dry_run=maybe"), "flag --dry_run=maybe: "),
    ((TINY, "--preset=best"), "--preset=best: no runs/presets/best.json; there are none"),
    ((TINY, "--point=best"), "--point=best: "),
    ((TINY, "--point"), "--point: expected one argument"),
]


@pytest.mark.parametrize(("arguments", "message"), TRAIN, ids=[" ".join(map(str, each)) for each, _ in TRAIN])
def test_training_is_refused_in_a_line(arguments, message, tmp_path):
    assert refused("train", *arguments, cwd=tmp_path).startswith(f"invalid config: {message}")


HEADER = "from research.settings.config import base_config\nARGS = ('',)\nHEADLINE = ()\n"
FILES = [
    ("def get_config(:\n", "bad.py, line 1: SyntaxError: invalid syntax"),
    ("\nraise KeyError('no')\n", "bad.py, line 2: KeyError: 'no'"),
    ("import nothing_like_it\n", "bad.py, line 1: ModuleNotFoundError: No module named 'nothing_like_it'"),
    ("ARGS = ('',)\n", "bad.py is no experiment, it lacks get_config, sweep, HEADLINE"),
    (
        HEADER
        + "def get_config(arg=''):\n  c = base_config()\n  c.train.step = 3\n  return c\ndef sweep(arg): return [{}]\n",
        "bad.py, line 6: AttributeError: ",
    ),
    (HEADER + "def get_config(arg=''): return {}\ndef sweep(arg): return [{}]\n", "get_config makes a dict; must be"),
    (HEADER + "def get_config(arg=''): 1 / 0\ndef sweep(arg): return []\n", "bad.py, line 4: ZeroDivisionError"),
]
SWEEPS = [
    ("def sweep(arg): return []\n", "its sweep has no points"),
    ("def sweep(arg): return 1 / 0\n", "bad.py, line 5: ZeroDivisionError: division by zero"),
    ("def sweep(arg): return [{'train.step': 3}]\n", "config.train.step: no such field"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=[message for _, message in FILES])
@pytest.mark.parametrize("launcher", ["train", "sweep"])
def test_an_experiment_that_cannot_be_read_is_told_in_a_line(launcher, text, message, tmp_path):
    (tmp_path / "bad.py").write_text(text)
    said = refused(launcher, "--config=bad.py", cwd=tmp_path)
    assert said.startswith("invalid config: --config=bad.py: ")
    assert message in said


@pytest.mark.slow
@pytest.mark.parametrize(("text", "message"), SWEEPS, ids=[message for _, message in SWEEPS])
@pytest.mark.parametrize("launcher", ["sweep", "bench"])
def test_a_sweep_that_cannot_be_read_is_told(launcher, text, message, tmp_path):
    (tmp_path / "bad.py").write_text(f"{HEADER}def get_config(arg=''): return base_config()\n{text}")
    code, _, err = run(launcher, "--config=bad.py", cwd=tmp_path)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.glob("runs*")) == []


@pytest.mark.slow
def test_a_sweep_of_impossible_points_is_refused_at_once(tmp_path):
    said = refused("sweep", TINY, "--config.attention.heads=3", cwd=tmp_path)
    assert said.startswith(
        "invalid config: config.attention.out_groups=2: must be a divisor of heads=3; so it is at each"
    )


OTHERS = [
    ("sweep", (TINY, "--parallel=x"), "flag --parallel=x: invalid literal"),
    ("sweep", (TINY, "--parallel=-1"), "flag --parallel=-1: -1 is not a non-negative integer"),
    ("sweep", (TINY, "--to=moon"), "flag --to=moon: value should be one of <here|slurm|wandb>"),
    ("sweep", (TINY, "--config.attention.top_k=3"), "config.attention.top_k=3: no point of "),
    ("sweep", (TINY, "--config.run.id=x"), "config.run.id: is set by the sweep itself"),
    ("bench", ("--fresh",), "--config: is missing"),
    ("bench", (TINY, "--config.bench.repeats=0"), "config.bench.repeats=0: must be positive"),
    ("masks", ("--visibility=dense",), "flag --visibility=dense: value should be one of <sliding|hca|csa>"),
    ("masks", ("--config.seed=3",), "--config.seed: has no effect without --config"),
    ("masks", ("--seq_len=64", "--plot=x.doc"), "--plot=x.doc: must end in one of "),
    ("aot", (TINY, "--config.aot.topology=v9:2x2"), "config.aot.topology='v9:2x2': must be CHIP:MESH"),
    ("aot", (TINY, "--config.aot.what=all"), "config.aot.what=('all',): must be"),
    ("selection", ("--lengths=",), "--lengths=: must be positive integers"),
    ("selection", ("--lengths=12a",), "--lengths=12a: must be positive integers"),
    ("selection", ("--lengths=64", "more"), "more: unexpected"),
    ("selection", (TINY,), "--config: no such flag"),
    ("peers", ("--kinds=",), "--kinds=: must be among sliding, hca, csa"),
    ("peers", ("--kinds=dense",), "--kinds=dense: must be among sliding, hca, csa"),
    ("report", ("--runs=nowhere",), "--runs=nowhere: no such folder"),
    ("report", ("nowhere",), "nowhere: unexpected"),
    ("import_weights", ("--id=x",), "FOLDER: is missing"),
    ("import_weights", ("nowhere",), "nowhere: holds no config.json"),
    ("import_weights", ("nowhere", "more"), "more: unexpected; see --help"),
    ("import_weights", ("nowhere", "--config.seed=3"), "--config.seed: no such flag"),
    ("export_weights", ("a",), "FOLDER: is missing"),
    ("export_weights", ("a", "b", "--dtype=int8"), "flag --dtype=int8"),
    ("export_weights", ("a", "b"), "ID: runs/a is unfinished, or no run"),
]


@pytest.mark.parametrize(
    ("launcher", "arguments", "message"), OTHERS, ids=[" ".join((name, *arguments)) for name, arguments, _ in OTHERS]
)
def test_other_launchers_refuse_in_a_line(launcher, arguments, message, tmp_path):
    assert refused(launcher, *arguments, cwd=tmp_path).startswith(f"invalid config: {message}")


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "platform"), [("train", "cuda"), ("sweep", "toaster"), ("bench", "cuda")])
def test_a_platform_that_is_not_there_is_named(launcher, platform, tmp_path):
    said = refused(launcher, TINY, cwd=tmp_path, JAX_PLATFORMS=platform)
    assert said.startswith(f"invalid config: JAX_PLATFORMS={platform}: must name platforms that are here, or be unset")


def test_wandb_is_asked_before_anything_is_done(tmp_path):
    online = f"{TINY} --config.wandb.mode=online --config.data.path=/nowhere".split()
    assert "config.wandb.mode='online': must be auto, offline" in refused("train", *online, cwd=tmp_path, **NOBODY)
    auto = f"{TINY} --config.wandb.mode=auto --config.data.path=/nowhere".split()
    said = refused("sweep", *auto, cwd=tmp_path, WANDB_MODE="onlin")
    assert said.startswith("invalid config: WANDB_MODE=onlin: must be one of online, offline, disabled")
    said = refused("train", *auto, cwd=tmp_path, WANDB_MODE="online", **NOBODY)
    assert said.startswith("invalid config: WANDB_MODE=online: must be offline or disabled while not logged in")


@pytest.mark.slow
def test_wandb_disabled_is_honoured_and_home_is_the_home(tmp_path):
    overrides = "--config.wandb.mode=auto --config.train.steps=3e0 --config.run.root=~/my/runs --config.run.id=one"
    code, out, err = run("train", TINY, *overrides.split(), cwd=tmp_path, HOME=str(tmp_path), WANDB_DISABLED="true")
    assert code == 0, err
    folder = tmp_path / "my" / "runs" / "one"
    assert (folder / "summary.json").exists()
    assert not (folder / "wandb").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["my"]
    told = out.splitlines()[-1].rpartition(": ")[2]
    assert pathlib.Path(told) == folder / "summary.json"


@pytest.mark.slow
def test_a_typo_does_not_spoil_the_id(tmp_path):
    line = [TINY, "--config.train.steps=3", "--config.run.id=one", "--config.run.root=r"]
    assert "config.data.path='/nowhere': does not exist" in refused(
        "train", *line, "--config.data.path=/nowhere", cwd=tmp_path
    )
    assert list(tmp_path.iterdir()) == []
    assert run("train", *line, cwd=tmp_path)[0] == 0


@pytest.mark.slow
def test_two_equal_commands_at_once_are_two_runs(tmp_path):
    both = [start("train", TINY, "--config.train.steps=3", cwd=tmp_path) for _ in range(2)]
    assert [process.communicate()[1] and process.returncode for process in both] in ([0, 0], ["", ""])
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_stop_a_run(tmp_path):
    """As `| head -1`."""
    process = start("train", TINY, "--config.run.id=one", cwd=tmp_path)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 0, err
    assert "output: its reader has gone; the work goes on" in err
    assert (tmp_path / "runs" / "one" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_does_not_fit_the_disk_is_a_line(tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, ROOT / "launch" / "masks.py", "--seq_len=256", "--block=128", "--runs=r"]
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "disk full: [Errno 28] No space left on device: '<stdout>'\n")


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_report_is_written_whole_or_not_at_all(tmp_path):
    (tmp_path / "aot" / "claims").mkdir(parents=True)
    shutil.copy(ROOT / "analysis" / "results" / "seed_claims.jsonl", tmp_path / "aot" / "claims" / "results.jsonl")
    before = tmp_path / "report.html"
    before.write_text("the one before")
    (tmp_path / "report.html.new").symlink_to("/dev/full")
    code, _, err = run("report", f"--runs={tmp_path}", cwd=tmp_path)
    assert (code, err.count("\n")) == (1, 1), err
    assert err.startswith("disk full: ")
    assert before.read_text() == "the one before"
    code, out, err = run("report", f"--runs={tmp_path}", cwd=tmp_path)
    assert (code, out) == (0, f"{before}\n"), err
    assert before.read_text().endswith("</html>")


@pytest.mark.slow
def test_a_full_disk_is_a_line(small_disk, tmp_path):
    filled = ["--config.train.checkpoint_every=1", "--config.train.keep_last=100", "--config.wandb.mode=disabled"]
    code, _, err = run("train", TINY, *filled, f"--config.run.root={small_disk}", cwd=tmp_path)
    assert (code, err.count("\n")) == (1, 1), err
    assert err.startswith("disk full: [Errno 28] No space left on device: ")


@pytest.mark.slow
def test_what_the_length_leaves_idle_is_a_warning_on_screen_and_in_the_record(tmp_path):
    asked = ["--config.attention.window=4096", "--config.train.steps=2e0", "--config.optimizer.warmup_steps=1"]
    code, out, err = run("train", TINY, *asked, "--config.run.id=a", "--config.wandb.mode=disabled", cwd=tmp_path)
    assert code == 0, err
    (start,) = (json.loads(line) for line in (tmp_path / "runs" / "a" / "starts.jsonl").read_text().splitlines())
    assert any("attention.window=4096" in note for note in start["notes"])
    for note in start["notes"]:
        assert f"warning: {note}\n" in out


@pytest.mark.slow
def test_an_encoding_that_lacks_letters_is_no_crash(tmp_path):
    for launcher, *arguments in (("train", "--help"), ("masks", "--seq_len=256", "--block=128", "--runs=r")):
        code, out, err = run(launcher, *arguments, cwd=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
        assert code == 0, err
        assert out.isascii()


@pytest.mark.slow
def test_a_plot_is_what_its_name_says(tmp_path):
    code, out, err = run("masks", "--seq_len=256", "--block=128", "--plot=x.pdf", "--runs=r", cwd=tmp_path)
    assert code == 0, err
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")
    assert "plot: x.pdf" in out


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_measurement_that_is_stopped_shows_what_is_done_and_goes_on(number, tmp_path):
    command = ("selection", "--lengths=256,262144", "--top_k=16", "--runs=r")
    # Where tests run in the background, SIGINT is ignored, and stays so in what they start.
    arguments = ["env", "--default-signal=INT", sys.executable, ROOT / "launch" / f"{command[0]}.py", *command[1:]]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(arguments, cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **output)
    results = tmp_path / "r" / "selection" / "results.jsonl"
    while process.poll() is None and not (results.exists() and results.read_text().count("\n") >= 3):
        time.sleep(0.05)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "3 programs are left; the same command goes on with them" in out + err
    assert "Traceback" not in err
    assert "threshold" in out + err


def test_a_launcher_whose_rows_all_failed_says_why_and_fails(tmp_path):
    code, out, _ = run("selection", "--lengths=64", "--timeout_minutes=0.0001", "--runs=r", cwd=tmp_path)
    assert code == 1
    assert "3 rows: over 0 s" in out


# The second imports JAX itself, while it is read.
@pytest.mark.parametrize("config", [TINY, f"--config={ROOT}/experiments/attention_kinds.py:demo"])
def test_a_start_that_is_interrupted_is_a_line(config, tmp_path):
    """In the midst of an import, whose extension modules do not bear an exception."""
    arguments = ["env", "--default-signal=INT", sys.executable, ROOT / "launch" / "train.py", config]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(arguments, cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **output)
    maps = pathlib.Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "jaxlib" not in maps.read_text():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (-signal.SIGINT, "interrupted: SIGINT, at once\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: requirements-tpu.txt")
def test_a_topology_that_there_is_not_is_named(tmp_path):
    said = refused("aot", TINY, "--config.aot.topology=v6e:3x5", cwd=tmp_path)
    assert said.startswith("invalid config: config.aot.topology='v6e:3x5': must be a mesh that its chip comes in (")
