import atexit
import gc
import os
import shutil
import signal
import subprocess
import tempfile
import types

import jax
import pytest
from jax._src import callback
from jaxtyping import config, install_import_hook

# Annotated shapes and dtypes are checked wherever a test calls what has them; of runs, nothing is.
install_import_hook(["research.attention", "research.model"], "typeguard.typechecked")

from research import devices  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(50_000)  # tracing makes many objects and little garbage: a sixth of the time went into looking for it
# Most programs here are small and run once: to optimize them, or to share them out among threads, takes longer than it
# saves. XLA_FLAGS="" compiles them as users do. Newer versions always emit fusions by way of MLIR, which takes half of
# what is left.
if "XLA_FLAGS" not in os.environ:
    names = ["backend_optimization_level=0", "cpu_multi_thread_eigen=false", "cpu_parallel_codegen_split_count=1"]
    names += ["cpu_use_fusion_emitters=false"] if jax.__version_info__ < (0, 11) else []
    os.environ["XLA_FLAGS"] = " ".join(f"--xla_{name}" for name in names)
# An interpreted kernel calls Python thousands of times, and JAX puts all arguments on a device first, which takes four
# fifths of its time. The interpreter copies what it keeps: NumPy's arrays serve it as well.
callback.api = types.SimpleNamespace(**{**vars(callback.api), "device_put": lambda arrays, device: arrays})


def _share_programs():
    """Each program is compiled once for all tests and the processes that they start, two workers' among them.

    In a folder of this session: a program compiled in an earlier one would hide that this one no longer compiles.
    """
    if "TESTS_PROGRAMS" not in os.environ:
        folder = os.environ["TESTS_PROGRAMS"] = tempfile.mkdtemp(prefix="programs-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    settings = {
        "jax_compilation_cache_dir": os.environ["TESTS_PROGRAMS"],
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


_share_programs()
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # shells have what they run in the background ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
devices.ignore_absent_devices()
if jax.config.jax_platforms:
    os.environ["JAX_PLATFORMS"] = jax.config.jax_platforms  # of programs that tests start without a launcher


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """A program takes hundreds of memory maps; once the 65,530 that Linux allows are used up, compiling crashes."""
    yield
    jax.clear_caches()


@pytest.fixture
def unchecked_shapes():
    """Within it annotations are not checked, so that a test sees what a user is told."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MiB, which a run's checkpoints fill."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("may not mount a small disk here")
    yield disk
    subprocess.run(["umount", disk], check=True)
