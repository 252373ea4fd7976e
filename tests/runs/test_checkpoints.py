"""Checkpoints of a small state, damaged in every way that a disk knows."""

import errno
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.errors import ConfigError, DamagedError
from research.runs import checkpoints
from research.runs.checkpoints import Writer, fingerprints
from research.training.step import State

# orbax's own, of reads that it breaks off
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def state(step, width=300):
    params = {"module": {"w": jax.random.normal(jax.random.key(step), (40, width)), "b": jnp.ones(3, jnp.bfloat16)}}
    return State(params, (jnp.int32(step), jnp.array([True, False])))


def assert_is(restored, step):
    assert (restored.step, restored.iterator) == (step, {"next": step})
    jax.tree.map(np.testing.assert_array_equal, restored.state, state(step))
    assert jax.tree.map(lambda x: x.dtype, restored.state) == jax.tree.map(lambda x: x.dtype, state(step))


def write(folder, steps, losses=None, known=None, **kept):
    with Writer(folder, **kept) as writer:
        writer.validated(known or {})
        for step in steps:
            writer.save(step, state(step), {"next": step})
            if step in (losses or {}):
                writer.validated({step: losses[step]})  # a step is saved before it is validated
        writer.wait()


def newest(folder, like, damage=()):
    """The newest whole checkpoint; `damage` is what has to be said on the way."""
    said = []
    found = checkpoints.newest(folder, like, said.append)
    assert [line.partition(" (")[0] for line in said] == list(damage)
    return found


def kept_steps(folder):
    return sorted(int(path.name) for path in folder.iterdir())


def test_newest_and_best_are_kept(tmp_path):
    write(tmp_path / "a", range(1, 7), keep_last=2)
    assert kept_steps(tmp_path / "a") == [5, 6]
    # 3 has the lowest loss; 4, without one, is not taken for better.
    write(tmp_path / "b", range(1, 7), {1: 2.0, 2: 3.0, 3: 1.0, 5: 1.5}, keep_last=1, keep_best=1)
    assert kept_steps(tmp_path / "b") == [3, 6]
    write(tmp_path / "b", (7, 8), {7: 0.5}, {3: 1.0}, keep_last=1, keep_best=1)  # in a new process, as it were
    assert kept_steps(tmp_path / "b") == [7, 8]


def test_nothing_to_restore(tmp_path):
    assert newest(tmp_path, state(0)) is None
    assert newest(tmp_path / "absent", state(0)) is None
    assert not (tmp_path / "absent").exists()


def test_state_may_be_donated_while_it_is_written(tmp_path):
    advance = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), x), donate_argnums=0)
    like = State({"m": {"w": jnp.zeros(2_000_000)}}, ())
    current = like
    with Writer(tmp_path, keep_last=3) as writer:
        for step in (1, 2, 3):
            current = advance(current)
            writer.save(step, current, {})
            for _ in range(5):
                current = advance(current)
    restored = newest(tmp_path, like)
    np.testing.assert_array_equal(restored.state.params["m"]["w"], np.full(2_000_000, 13.0, np.float32))


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact")
    write(folder, (1, 2), keep_last=2)
    return folder


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


def largest(folder):
    return max((folder / "state").rglob("*"), key=lambda path: path.stat().st_size)


# The files without which a checkpoint cannot be read; damage to the others changes nothing.
NEEDED = {
    "record": lambda folder: folder / "record" / "metadata",
    "manifest": lambda folder: folder / "state" / "manifest.ocdbt",
    "index": lambda folder: next((folder / "state" / "d").iterdir()),
    "arrays": largest,
}


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [pathlib.Path.unlink, truncate, flip, empty], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", NEEDED)
def test_damaged_checkpoint_is_passed_over_and_put_aside(intact, tmp_path, file, damage):
    folder = tmp_path / "copy"
    shutil.copytree(intact, folder)
    damage(NEEDED[file](folder / "2"))
    damaged = contents(folder / "2")
    assert_is(newest(folder, state(0), ["checkpoint 2 is damaged"]), 1)
    write(folder, [2], keep_last=2)
    # It is still there, as it was, beside the one that took its place.
    assert contents(folder / "2.damaged") == damaged
    assert_is(newest(folder, state(0)), 2)


def test_any_file_may_be_damaged(intact, tmp_path):
    """One of two checkpoints is restored, bit for bit, whichever file of the newer one lost its second half."""
    for number, name in enumerate(sorted(path.relative_to(intact) for path in (intact / "2").rglob("*"))):
        if not (intact / name).is_file():
            continue
        folder = tmp_path / str(number)
        shutil.copytree(intact, folder)
        truncate(folder / name)
        restored = checkpoints.newest(folder, state(0), lambda line: None)
        assert_is(restored, restored.step)


def test_what_is_damaged_is_named(intact, tmp_path):
    for name, damage, told in (
        ("record/metadata", pathlib.Path.unlink, r"^record/metadata is missing$"),
        ("record/metadata", truncate, r"^one of its JSON files is none: "),
        ("state/manifest.ocdbt", flip, r"CRC-32C checksum"),
        ("state/_METADATA", pathlib.Path.unlink, r"^state/_METADATA is missing$"),
    ):
        folder = tmp_path / damage.__name__ / name
        shutil.copytree(intact, folder)
        damage(folder / "2" / name)
        before = contents(folder)
        with pytest.raises(DamagedError, match=told):
            checkpoints.read(folder, 2, state(0))
        assert contents(folder) == before


def test_empty_folder_and_half_written_checkpoint_are_none(intact, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(intact, folder)
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp")
    (folder / "4").mkdir()
    assert_is(newest(folder, state(0), ["checkpoint 4 is damaged"]), 2)
    assert newest(folder, state(0)).step == 2


def test_reading_changes_nothing(intact, tmp_path):
    """Not even what another process has half written, or what is damaged."""
    folder = tmp_path / "copy"
    shutil.copytree(intact, folder)
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp")
    flip(largest(folder / "2"))
    before = contents(folder)
    assert checkpoints.steps(folder) == [2, 1]
    assert_is(checkpoints.read(folder, 1, state(0)), 1)
    with pytest.raises(DamagedError, match=r"^params/module/w do not match their fingerprints$"):
        checkpoints.read(folder, 2, state(0))
    assert contents(folder) == before


def test_where_none_is_whole_nothing_is_changed_and_said_what_to_do(intact, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(intact, folder)
    flip(largest(folder / "1"))
    (folder / "2" / "record" / "metadata").unlink()
    before = contents(folder)
    with pytest.raises(DamagedError) as raised:
        newest(folder, state(0))
    message = str(raised.value)
    for part in ("none of the checkpoints is whole", "2: record/metadata is missing", "1: params/module/w", "Put back"):
        assert part in message
    assert contents(folder) == before
    # Nor where an earlier version has put them all aside.
    for step in ("1", "2"):
        (folder / step).rename(folder / f"{step}.damaged")
    with pytest.raises(DamagedError, match=r"1\.damaged: put aside before; 2\.damaged: put aside before"):
        newest(folder, state(0))


def test_checkpoint_of_another_model_is_refused_and_kept(intact):
    with pytest.raises(ConfigError) as refusal:
        newest(intact, state(0, width=200))
    assert str(refusal.value) == (
        "checkpoint 2 does not fit the model (params/module/w: float32[40, 300] there, float32[40, 200] here)"
    )
    assert_is(newest(intact, state(0)), 2)


# What a disk, a network or a machine in trouble says; none of it tells anything of the file.
TROUBLE = "ESTALE EMFILE ENFILE ETIMEDOUT EBUSY ENOMEM EIO EACCES EPERM ENOENT EINTR ENOTCONN ENODEV EAGAIN"


def raised_by_orbax(number):
    return OSError(number, os.strerror(number), "x")


def raised_by_tensorstore(number):
    return ValueError(f"UNKNOWN: Error reading local file \"x\": [os_error_code='{number}']")


def wrapped_by_orbax(number):
    """DATA_LOSS is what tensorstore makes of some failures that it does not know."""
    error = Exception("Encountered error while reading array index: ()")
    error.__cause__ = ValueError(f"DATA_LOSS: Error reading local file \"x\": [os_error_code='{number}']")
    return error


@pytest.mark.parametrize("told_by", [raised_by_orbax, raised_by_tensorstore, wrapped_by_orbax])
@pytest.mark.parametrize("name", TROUBLE.split())
def test_trouble_is_not_taken_for_damage(intact, monkeypatch, name, told_by):
    number = getattr(errno, name)
    before = contents(intact)

    def refuse(*_, **__):
        raise told_by(number)

    handler = checkpoints.ocp.JsonCheckpointHandler if told_by is raised_by_orbax else None
    handler = handler or checkpoints.ocp.StandardCheckpointHandler
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r".") as raised:
        patch.setattr(handler, "restore", refuse)
        newest(intact, state(0))
    assert raised.value.errno == number
    assert contents(intact) == before
    assert_is(newest(intact, state(0)), 2)


@pytest.mark.parametrize(
    "error", [MemoryError("host"), RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), RuntimeError("INTERNAL: device")]
)
def test_failure_of_something_else_is_not_taken_for_damage(intact, monkeypatch, error):
    def refuse(*_, **__):
        raise error

    before = contents(intact)
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(checkpoints.ocp.StandardCheckpointHandler, "restore", refuse)
        newest(intact, state(0))
    assert contents(intact) == before


def test_real_lack_of_file_handles_is_not_taken_for_damage(intact):
    """In a process of its own, which may open no more files."""
    script = f"""
import os, pathlib, resource, sys
from tests.runs.test_checkpoints import newest, state
like = state(0)
newest(pathlib.Path({str(intact)!r}), like)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')), 4096))
try:
    newest(pathlib.Path({str(intact)!r}), like)
except OSError as error:
    sys.exit(error.errno)
"""
    before = contents(intact)
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == errno.EMFILE, done.stderr
    assert contents(intact) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_fingerprint_sees_every_changed_bit(dtype):
    array = np.asarray(jax.random.bernoulli(jax.random.key(0), 0.5, (3, 5)).astype(dtype))
    before = fingerprints(array)
    bits = 1 if dtype == "bool" else 8 * array.itemsize
    for place in np.ndindex(array.shape):
        changed = np.tile(array, (bits, 1, 1)).reshape(bits, *array.shape)
        words = changed.view(f"uint{8 * array.itemsize}")
        for bit in range(bits):
            words[(bit, *place)] ^= words.dtype.type(1 << bit)
        assert (np.asarray(jax.vmap(fingerprints)(changed)) != before).all()


def test_fingerprint_sees_what_moved():
    array = jnp.arange(12.0).reshape(3, 4)
    marks = {int(fingerprints(x)) for x in (array, array[::-1], array[:, ::-1], array.reshape(4, 3).T, array * 0)}
    assert len(marks) == 5
