"""Our layer against the fixtures that `make_fixtures.py` wrote from Hugging Face transformers' DeepSeek-V4."""

import functools

import jax
import numpy as np
import pytest

from research.attention.visibility import KINDS
from tests.parity import cases


@functools.cache
def fixture(name: str) -> cases.Arrays:
    with np.load(cases.FIXTURES / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def stored(kind: str, label: str | int) -> cases.Arrays:
    """The fixture's arrays under `label:`."""
    prefix = f"{label}:"
    return {name.removeprefix(prefix): array for name, array in fixture(kind).items() if name.startswith(prefix)}


def marked(case):
    """The longest takes seconds, and differs from the others in its positions alone."""
    _, seq_len, _ = case
    return pytest.param(*case, marks=pytest.mark.slow if seq_len == cases.LONG else ())


@pytest.mark.parametrize(("kind", "seq_len", "rope"), map(marked, cases.CASES), ids=cases.case_id)
def test_outputs_and_gradients(kind, seq_len, rope):
    x, cotangent = (fixture("inputs")[name][:, :seq_len] for name in ("x", "cotangent"))
    ours = cases.run(kind, rope, stored(kind, "weight"), x, cotangent)
    cases.assert_equal(cases.kept(ours), stored(kind, seq_len))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_cover_every_parameter(kind):
    shapes = jax.eval_shape(cases.layer(kind, cases.ROPE).init, jax.random.key(0), np.zeros((1, 1, cases.HIDDEN)))
    ours = {f"{module}/{name}": leaf.shape for module, leaves in shapes.items() for name, leaf in leaves.items()}
    assert {name: array.shape for name, array in stored(kind, "weight").items()} == ours


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hca", "csa"])
def test_the_long_case_tells_yarn_from_plain_rope(kind):
    """Else the case would prove nothing: without YaRN the last rows must miss the tolerance by far."""
    apply = jax.jit(cases.layer(kind, cases.ROPE).apply)
    output = apply(cases.unflatten(stored(kind, "weight")), fixture("inputs")["x"])
    expected = stored(kind, cases.LONG)["output"]
    assert np.abs(output[:, -cases.KEPT_ROWS :] - expected).max() > 1e-2 * np.abs(expected).max()


def test_fixtures_stay_small():
    assert sum(path.stat().st_size for path in cases.FIXTURES.iterdir()) < 3_000_000
