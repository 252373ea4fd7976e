"""Checkpoints of a small state, damaged in every way that a disk knows."""

import pathlib
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.config import ConfigError
from research.training.checkpoints import Checkpoints, fingerprints
from research.training.step import State

# orbax's own, of reads that it breaks off
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def state(step, width=300):
    params = {"module": {"w": jax.random.normal(jax.random.key(step), (40, width)), "b": jnp.ones(3, jnp.bfloat16)}}
    return State(params, (jnp.int32(step), jnp.array([True, False])))


def assert_is(restored, step):
    assert (restored.step, restored.iterator) == (step, {"next": step})
    jax.tree.map(np.testing.assert_array_equal, restored.state, state(step))
    assert jax.tree.map(lambda x: x.dtype, restored.state) == jax.tree.map(lambda x: x.dtype, state(step))


def write(folder, steps, losses=None, **kept):
    with Checkpoints(folder, **kept) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"next": step}, (losses or {}).get(step))


def kept_steps(folder):
    return sorted(int(path.name) for path in folder.iterdir())


def test_newest_and_best_are_kept(tmp_path):
    write(tmp_path / "a", range(1, 7), keep_last=2)
    assert kept_steps(tmp_path / "a") == [5, 6]
    # 3 has the lowest loss; 4, without one, is not taken for better.
    write(tmp_path / "b", range(1, 7), {1: 2.0, 2: 3.0, 3: 1.0, 5: 1.5}, keep_last=1, keep_best=1)
    assert kept_steps(tmp_path / "b") == [3, 6]
    write(tmp_path / "b", (7, 8), {7: 0.5}, keep_last=1, keep_best=1)  # in a new process, as it were
    assert kept_steps(tmp_path / "b") == [7, 8]


def test_nothing_to_restore(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(state(0)) is None


def test_state_may_be_donated_while_it_is_written(tmp_path):
    advance = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), x), donate_argnums=0)
    like = State({"m": {"w": jnp.zeros(2_000_000)}}, ())
    current = like
    with Checkpoints(tmp_path, keep_last=3) as checkpoints:
        for step in (1, 2, 3):
            current = advance(current)
            checkpoints.save(step, current, {})
            for _ in range(5):
                current = advance(current)
    with Checkpoints(tmp_path, keep_last=3) as checkpoints:
        restored = checkpoints.restore(like)
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


@pytest.mark.parametrize("damage", [pathlib.Path.unlink, truncate, flip], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", NEEDED)
def test_damaged_checkpoint_is_passed_over_and_put_aside(intact, tmp_path, file, damage):
    folder = tmp_path / "copy"
    shutil.copytree(intact, folder)
    damage(NEEDED[file](folder / "2"))
    damaged = sorted(path.read_bytes() for path in (folder / "2").rglob("*") if path.is_file())
    with Checkpoints(folder, keep_last=2) as checkpoints:
        with pytest.warns(UserWarning, match=r"^checkpoint 2 is damaged \(.+\); kept as 2\.damaged$"):
            assert_is(checkpoints.restore(state(0)), 1)
        checkpoints.save(2, state(2), {"next": 2})
    # It is still there, as it was, beside the one that took its place.
    aside = folder / "2.damaged"
    assert sorted(path.read_bytes() for path in aside.rglob("*") if path.is_file()) == damaged
    with Checkpoints(folder, keep_last=2) as checkpoints, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_is(checkpoints.restore(state(0)), 2)


def test_any_file_may_be_damaged(intact, tmp_path):
    """One of two checkpoints is restored, bit for bit, whichever file of the newer one lost its second half."""
    for number, name in enumerate(sorted(path.relative_to(intact) for path in (intact / "2").rglob("*"))):
        if not (intact / name).is_file():
            continue
        folder = tmp_path / str(number)
        shutil.copytree(intact, folder)
        truncate(folder / name)
        with Checkpoints(folder, keep_last=2) as checkpoints, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            restored = checkpoints.restore(state(0))
        assert_is(restored, restored.step)


def test_empty_folder_and_half_written_checkpoint_are_none(intact, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(intact, folder)
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp")
    (folder / "4").mkdir()
    with Checkpoints(folder, keep_last=2) as checkpoints:
        with pytest.warns(UserWarning, match="checkpoint 4 is damaged"):
            assert_is(checkpoints.restore(state(0)), 2)
        assert checkpoints.restore(state(0)).step == 2


def test_all_damaged_is_as_none_and_nothing_is_lost(intact, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(intact, folder)
    for step in ("1", "2"):
        flip(largest(folder / step))
    with Checkpoints(folder, keep_last=2) as checkpoints, pytest.warns(UserWarning) as warned:
        assert checkpoints.restore(state(0)) is None
    assert len(warned) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["1.damaged", "2.damaged"]


def test_checkpoint_of_another_model_is_refused_and_kept(intact):
    with Checkpoints(intact, keep_last=2) as checkpoints:
        with pytest.raises(ConfigError) as refusal:
            checkpoints.restore(state(0, width=200))
        assert str(refusal.value) == (
            "checkpoint 2 does not fit the model (params/module/w: float32[40, 300] there, float32[40, 200] here)"
        )
        assert_is(checkpoints.restore(state(0)), 2)


def test_unreadable_disk_is_not_taken_for_damage(intact, monkeypatch):
    with Checkpoints(intact, keep_last=2) as checkpoints:

        def refuse(*_, **__):
            raise PermissionError(13, "Permission denied", "x")

        with monkeypatch.context() as patch, pytest.raises(PermissionError):
            patch.setattr(checkpoints._manager, "restore", refuse)
            checkpoints.restore(state(0))
        assert_is(checkpoints.restore(state(0)), 2)


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
