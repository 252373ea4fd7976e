import atexit
import os
import shutil
import tempfile

import jax
import pytest
from jaxtyping import config, install_import_hook

# Annotated shapes and dtypes are checked wherever a test calls what has them; of runs, nothing is.
install_import_hook(["research.attention", "research.model"], "typeguard.typechecked")

from research import devices  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


def _share_programs():
    """Each program is compiled once for all tests and the processes that they start, two workers' among them.

    In a folder of this session: a program compiled in an earlier one would hide that this one no longer compiles.
    """
    if "TESTS_PROGRAMS" not in os.environ:
        folder = os.environ["TESTS_PROGRAMS"] = tempfile.mkdtemp(prefix="programs-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    settings = {
        "jax_compilation_cache_dir": os.environ["TESTS_PROGRAMS"],
        "jax_persistent_cache_min_compile_time_secs": 0.2,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


_share_programs()
devices.ignore_absent_tpu()
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
