import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
# A program compiled in an earlier session would hide that this one no longer compiles.
jax.config.update("jax_enable_compilation_cache", False)
