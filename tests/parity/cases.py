"""The parity cases, our side of them, and the comparison. Imports neither PyTorch nor transformers."""

import dataclasses
import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from research.attention.attend import Documents
from research.attention.layer import attention
from research.attention.spec import Spec
from research.attention.visibility import KINDS
from research.settings.attention import Attention, Rope
from research.settings.config import Settings
from tests import oracles

Arrays = dict[str, np.ndarray]
FIXTURES = pathlib.Path(__file__).parent / "fixtures"
LENGTHS = (1, 3, 127, 128, 129, 300, 489, 1024)
LONG = 4_224  # one HCA window past position 4,096
KEPT_ROWS = 1_024  # last rows that a comparison looks at: all of them but in the longest case
HIDDEN = 16
ATTENTION = Attention(
    backend="dot_product",
    top_k=8,
    head_width=16,
    rope_width=8,
    q_rank=8,
    out_rank=6,
    index_heads=16,
    index_head_width=12,
    index_backend="xla",
    indexer_loss_weight=0.0,
)
ROPE = Rope(angles="reference")
# Short enough that of the four channel pairs one is kept, one lies on the ramp and two are stretched.
YARN = dataclasses.replace(ROPE, yarn_factor=16.0, yarn_original_length=256)
CASES = [(kind, seq_len, ROPE) for kind in KINDS for seq_len in LENGTHS]
CASES += [(kind, LONG, YARN) for kind in ("hca", "csa")]


def case_id(value) -> str:
    """Names a case's parts for pytest."""
    return ("yarn" if value.yarn_factor != 1 else "plain") if isinstance(value, Rope) else str(value)


def spec(rope: Rope = ROPE, settings: Attention = ATTENTION, dtype: str = "float32") -> Spec:
    """Of layers of every kind, `HIDDEN` wide."""
    model = {"layers": tuple(KINDS), "hidden": HIDDEN, "dtype": dtype}
    return Spec.make(dataclasses.replace(Settings().replace(model=model), attention=settings, rope=rope))


def layer(kind: str, rope: Rope) -> hk.Transformed:
    """Our layer as a function of x [B, S, E], at positions 0 to S - 1."""

    def forward(x):
        return attention.Attention(spec(rope), kind)(x, Documents.whole(*x.shape[:2]))[0]

    return hk.without_apply_rng(hk.transform(forward))


def run(kind: str, rope: Rope, parameters: Arrays, x: np.ndarray, cotangent: np.ndarray) -> Arrays:
    """Our layer's `output` [B, S, E], and the gradients of `sum(output * cotangent)` by `x` and by each parameter."""
    apply = layer(kind, rope).apply

    @jax.jit
    def output_and_gradients(parameters, x):
        output, pull_back = jax.vjp(apply, parameters, x)
        return output, *pull_back(jnp.asarray(cotangent))

    output, by_parameter, by_x = jax.device_get(output_and_gradients(unflatten(parameters), x))
    return {"output": output, "x": by_x, **flatten(by_parameter)}


def kept(results: Arrays) -> Arrays:
    """What a fixture holds of a case: `KEPT_ROWS` of its output and of its gradient by x, else everything."""
    return results | {name: results[name][:, -KEPT_ROWS:] for name in ("output", "x")}


def assert_equal(ours: Arrays, reference: Arrays) -> None:
    """Outputs to 1e-5 and gradients to 1e-4 of the largest entry."""
    assert ours.keys() == reference.keys()
    for name, expected in reference.items():
        try:
            oracles.assert_close(ours[name], expected, 1e-5 if name == "output" else 1e-4)
        except AssertionError as error:
            error.add_note(f"in {name}")
            raise


def flatten(parameters: hk.Params) -> Arrays:
    """{'module/parameter': array}."""
    return {f"{module}/{name}": np.asarray(array) for module, name, array in hk.data_structures.traverse(parameters)}


def unflatten(parameters: Arrays) -> hk.Params:
    """The inverse of `flatten`."""
    tree: dict[str, dict[str, np.ndarray]] = {}
    for name, array in parameters.items():
        module, _, leaf = name.rpartition("/")
        tree.setdefault(module, {})[leaf] = array
    return tree
