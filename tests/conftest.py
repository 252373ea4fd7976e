import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
# A program compiled in an earlier session would hide that this one no longer compiles.
jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """A program takes hundreds of memory maps; once the 65,530 that Linux allows are used up, compiling crashes."""
    yield
    jax.clear_caches()
