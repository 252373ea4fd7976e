import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from research.attention.layer.norms import RMSNorm


def test_is_computed_in_float32():
    """1,024 channels of which bfloat16 could not add up the squares; the scale keeps bits that bfloat16 drops."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 1_024)), jnp.bfloat16)
    scale = jnp.full(1_024, 1 + 2**-10)
    norm = hk.without_apply_rng(hk.transform(lambda x: RMSNorm(1e-6, name="norm")(x)))
    out = norm.apply({"norm": {"scale": scale}}, x)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt(np.square(exact).mean(-1, keepdims=True) + 1e-6) * (1 + 2**-10)
    np.testing.assert_array_equal(out, jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16))


def test_parameters():
    norm = hk.transform(lambda x: RMSNorm(1e-6, name="norm")(x) + RMSNorm(1e-6, create_scale=False, name="bare")(x))
    parameters = norm.init(jax.random.key(0), jnp.zeros((2, 4), jnp.bfloat16))
    assert parameters.keys() == {"norm"}
    np.testing.assert_array_equal(parameters["norm"]["scale"], np.ones(4, np.float32))
    assert parameters["norm"]["scale"].dtype == jnp.float32
