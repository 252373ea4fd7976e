"""Full disks, folders that cannot be written, damaged data, too little memory: one clear error, and nothing lost."""

import gzip
import pathlib
import subprocess

import pytest
import rich.console

from research import errors
from research.data import corpus
from research.errors import ConfigError
from research.runs import files, tracking
from research.runs.folder import read_rows
from research.settings.config import read
from research.training import inspection, loop, run, steps
from tests import tiny

QUIET = rich.console.Console(quiet=True)
NO_SPACE = r"^\[Errno 28\] No space left on device: '.*/"
OVERCOMMIT = pathlib.Path("/proc/sys/vm/overcommit_memory")


def make(folder, **overrides):
    config = tiny.get_config()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    config.run.root, config.run.id = str(folder.parent), folder.name
    return config


@pytest.mark.slow
def test_disk_fills_up_while_checkpoints_are_written(small_disk):
    config = make(small_disk / "run", train__checkpoint_every=1, train__keep_last=100)
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device: '.+'$") as raised:
        run.run(read(config), {}, QUIET)
    assert errors.kind(raised.value) == "disk full"
    assert str(small_disk / "run") in str(raised.value)
    folder = small_disk / "run"
    recorded = read_rows(folder)
    assert [row["step"] for row in recorded] == list(range(1, len(recorded) + 1))
    checkpoints = [int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()]
    assert sorted(checkpoints) == list(range(1, len(checkpoints) + 1))
    assert len(checkpoints) > 2
    # With room again, the run goes on.
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    assert run.run(read(config), {}, QUIET)["steps"] == 12
    assert [row["step"] for row in read_rows(folder)] == list(range(1, 13))


def test_disk_is_full_when_a_row_is_written(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with (
        tracking.Tracker(tmp_path, read(make(tmp_path)), print) as tracker,
        pytest.raises(OSError, match=rf"{NO_SPACE}metrics.jsonl'"),
    ):
        tracker.log(1, {"loss": 2.5})


def test_disk_is_full_when_a_file_is_written_anew(tmp_path):
    files.write_json(tmp_path / "summary.json", {"status": "ok"})
    (tmp_path / "summary.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"{NO_SPACE}summary.json'"):
        files.write_json(tmp_path / "summary.json", {"status": "error"})
    assert files.read_json(tmp_path / "summary.json") == {"status": "ok"}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_error_is_not_hidden_by_a_summary_that_cannot_be_written(tmp_path, monkeypatch):
    def fail(*_):
        (tmp_path / "run" / "summary.json.new").symlink_to("/dev/full")
        raise NotImplementedError("the error")

    monkeypatch.setattr(loop, "train", fail)
    with pytest.raises(NotImplementedError, match=r"^the error$"):
        run.run(read(make(tmp_path / "run")), {}, QUIET)


def test_nan_is_told_also_where_nothing_can_be_kept(tmp_path, monkeypatch):
    def refuse(*_, validating):
        raise OSError(28, "No space left on device", "there")

    monkeypatch.setattr(inspection, "keep", refuse)
    message = r"^loss is nan at step 3; its state and batch could not be kept: .*No space left on device: 'there'$"
    with pytest.raises(errors.NonFiniteLossError, match=message):
        steps.require_finite({"loss": float("nan")}, 3, tmp_path, None)


@pytest.mark.parametrize(("root", "reason"), [("file", "Not a directory"), ("/proc/self", "No such file or directory")])
def test_folder_that_cannot_be_made_names_the_field(tmp_path, monkeypatch, root, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"^config.run.root='{root}': cannot hold the folder of the run: .*{reason}"):
        run.run(read(make(pathlib.Path(root) / "run")), {}, QUIET)


def test_folder_that_is_a_file_is_left_alone(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match=r"cannot hold the folder of the run: .*File exists"):
        run.run(read(make(tmp_path / "run")), {}, QUIET)
    assert (tmp_path / "run").read_text() == "mine"


def test_damaged_data_file_is_named(tmp_path):
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(name.encode() * 1000))
    damaged = tmp_path / "e.txt.gz"
    damaged.write_bytes(damaged.read_bytes()[:-12])
    config = make(tmp_path / "runs" / "run", data__path=f"{tmp_path}/*.gz")
    with pytest.raises(ConfigError, match=rf"^config.data.path: '{damaged}' is not a valid gzip file"):
        run.run(read(config), {}, QUIET)
    assert not (tmp_path / "runs").exists()


def test_data_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(corpus, "open", refuse, raising=False)
    with pytest.raises(ValueError, match=rf"^config.data.path: '{tmp_path}/a.txt' cannot be read: Permission denied$"):
        corpus.load(str(tmp_path / "a.txt"), 0.1)


@pytest.mark.slow
@pytest.mark.skipif(
    OVERCOMMIT.exists() and OVERCOMMIT.read_text().strip() == "1", reason="memory is never refused here"
)
def test_out_of_memory_names_the_step_and_the_sizes(tmp_path):
    """The dense backend on a quarter of a million tokens asks for 2 TiB."""
    config = make(tmp_path / "run", data__seq_len=2**18, data__batch_size=1)
    sizes = "config.data.batch_size=1, config.data.seq_len=262144"
    with pytest.raises(
        MemoryError, match=rf"^step 1: Out of memory allocating \d+ bytes; too much with {sizes}"
    ) as raised:
        run.run(read(config), {}, QUIET)
    assert errors.kind(raised.value) == "out of memory"
    assert files.read_json(tmp_path / "run" / "summary.json")["status"] == "out of memory"
