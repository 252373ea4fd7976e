"""The ways to compute a layer of experts. All compute the same sum, of every token and all of its experts.

That of token t is the sum over its experts e of `down[e](weight[t, e] * swiglu(gate[e](x[t]), up[e](x[t])))`, the
weight before the last product as in DeepSeek's own code. `dense` asks every expert about every token, `blocks` and
`ragged` sort the tokens by expert. Floats are gathered and added in a fixed order, never scattered, so that results do
not vary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from research.attention.product import precision, product
from research.errors import SettingError
from research.model.router import Routing, loads
from research.model.swiglu import swiglu
from research.settings.model import Experts

_LEAST_ROWS, _MOST_ROWS = 8, 128  # of a block, where they are chosen


class Matrices(NamedTuple):
    """Of X experts of width I."""

    gate: Float32[Array, "X E I"]
    up: Float32[Array, "X E I"]
    down: Float32[Array, "X I E"]


class Effective(NamedTuple):
    """How experts are computed: the name of the way, and the rows of a block, 0 where there are none."""

    backend: str
    block_rows: int

    def __call__(
        self, x: Float[Array, "T E"], routing: Routing, matrices: Matrices, limit: float
    ) -> Float32[Array, "T E"]:
        """Computes the sums, which are 0 for padding; `limit` as in `swiglu`."""
        return _TABLE[self.backend](x, routing, matrices, limit, self.block_rows)


def resolve(settings: Experts, tokens: int, platform: str) -> Effective:
    """How experts are computed: `blocks` on a CPU or GPU, where XLA's `ragged_dot` asks every expert about every token.

    Args:
      settings: of the experts.
      tokens: T, of one call.
      platform: 'cpu', 'gpu' or 'tpu'.

    Raises:
      SettingError: `block_rows` is set, and there are no blocks.
    """
    backend = settings.backend
    if backend == "auto":
        backend = "ragged" if platform == "tpu" else "blocks"
    if backend != "blocks":
        if settings.block_rows:
            raise SettingError("experts.block_rows", settings.block_rows, f"left at 0 with experts.backend={backend}")
        return Effective(backend, 0)
    # An expert's last block is half empty on average: of a quarter of its tokens, that is an eighth of the work.
    fair = max(1, tokens * settings.per_token // (4 * settings.count))
    rows = min(max(1 << fair.bit_length() - 1, _LEAST_ROWS), _MOST_ROWS)
    return Effective(backend, settings.block_rows or rows)


def _dense(
    x: Float[Array, "T E"], routing: Routing, matrices: Matrices, limit: float, block_rows: int
) -> Float32[Array, "T E"]:
    """Every expert, one after the other, for every token."""
    del block_rows

    @jax.checkpoint
    def step(total: Float32[Array, "T E"], one: tuple) -> tuple[Float32[Array, "T E"], None]:
        expert, (gate, up, down) = one
        weights = jnp.where(routing.ids == expert, routing.weights, 0).sum(axis=-1, keepdims=True)
        hidden = weights * _hidden(_times(x, gate), _times(x, up), limit)
        return total + _times(hidden.astype(x.dtype), down).astype(jnp.float32), None

    indices = jnp.arange(len(matrices.gate), dtype=jnp.int32)
    return jax.lax.scan(step, jnp.zeros(x.shape, jnp.float32), (indices, matrices))[0]


class _Plan(NamedTuple):
    """Where tokens are when they are sorted by expert, the tokens of each filling whole blocks of rows.

    Attributes:
      choice: which of the T * K choices a row is; T * K for none.
      token: whose choice it is; T for none.
      place: the row of each choice; R for padding, which has none.
      expert: of each block.
      used: how many blocks have rows; they are the first.
    """

    choice: Int32[Array, " R"]
    token: Int32[Array, " R"]
    place: Int32[Array, "T K"]
    expert: Int32[Array, " blocks"]
    used: Int32[Array, ""]


def _plan(ids: Int32[Array, "T K"], experts: int, block_rows: int) -> _Plan:
    """Sorts choices by expert, those of one expert by token."""
    flat, size = ids.reshape(-1), ids.size
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    rank = jnp.zeros(size, jnp.int32).at[order].set(jnp.arange(size, dtype=jnp.int32), unique_indices=True)
    counts = loads(ids, experts)
    blocks = -(-counts // block_rows)
    ends = jnp.cumsum(blocks)
    # Of each expert: its first choice in the order, and its first row.
    first, begin = jnp.cumsum(counts) - counts, (ends - blocks) * block_rows

    capacity = min(size, (size + experts * (block_rows - 1)) // block_rows)
    rows = capacity * block_rows
    own = jnp.minimum(flat, experts - 1)
    place = jnp.where(flat < experts, begin[own] + rank - first[own], rows)

    index = jnp.arange(capacity, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(ends, index, side="right").astype(jnp.int32), experts - 1)
    row = jnp.arange(rows, dtype=jnp.int32)
    of_row = jnp.repeat(expert, block_rows)
    offset = row - begin[of_row]
    taken = (offset < counts[of_row]) & (row < ends[-1] * block_rows)
    choice = jnp.where(taken, order.at[first[of_row] + offset].get(mode="clip"), size)
    return _Plan(choice, choice // ids.shape[1], place.reshape(ids.shape), expert, ends[-1])


def _rows(x: Float[Array, " T *rest"], index: Int32[Array, " n"]) -> Float[Array, " n *rest"]:
    """Rows of x; 0 beyond its last."""
    return x.at[index].get(mode="fill", fill_value=0)


def _summed(rows: Float[Array, "R E"], plan: _Plan) -> Float32[Array, "T E"]:
    """For each token, the sum of its rows."""
    total = jnp.zeros((len(plan.place), rows.shape[1]), jnp.float32)
    for k in range(plan.place.shape[1]):
        total += _rows(rows, plan.place[:, k]).astype(jnp.float32)
    return total


def _blocks(
    x: Float[Array, "T E"], routing: Routing, matrices: Matrices, limit: float, block_rows: int
) -> Float32[Array, "T E"]:
    """Block after block, each of tokens of one expert."""
    plan = _plan(routing.ids, len(matrices.gate), block_rows)
    return _by_blocks((limit, block_rows), plan, x, routing.weights, matrices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_blocks(
    static: tuple[float, int], plan: _Plan, x: Float[Array, "T E"], weights: Float32[Array, "T K"], matrices: Matrices
) -> Float32[Array, "T E"]:
    return _by_blocks_forward(static, plan, x, weights, matrices)[0]


def _by_blocks_forward(
    static: tuple[float, int], plan: _Plan, x: Float[Array, "T E"], weights: Float32[Array, "T K"], matrices: Matrices
) -> tuple[Float32[Array, "T E"], tuple]:
    limit, block_rows = static
    weight_of_row = _rows(weights.reshape(-1), plan.choice)

    def block(index: Int32[Array, ""], state: tuple) -> tuple:
        out, gates, ups = state
        gate, up, down = _of_expert(matrices, plan.expert[index], x.dtype)
        take, put = _slicer(index, block_rows)
        own = _rows(x, take(plan.token))
        gate, up = _times(own, gate), _times(own, up)
        hidden = take(weight_of_row)[:, None] * _hidden(gate, up, limit)
        return put(out, _times(hidden.astype(x.dtype), down)), put(gates, gate), put(ups, up)

    rows, width = len(plan.token), matrices.gate.shape[2]
    state = tuple(jnp.zeros((rows, columns), x.dtype) for columns in (x.shape[1], width, width))
    out, gates, ups = jax.lax.fori_loop(0, plan.used, block, state)
    return _summed(out, plan), (plan, x, weights, matrices, gates, ups)


def _by_blocks_backward(
    static: tuple[float, int], residuals: tuple, d_out: Float32[Array, "T E"]
) -> tuple[None, Float[Array, "T E"], Float32[Array, "T K"], Matrices]:
    limit, block_rows = static
    plan, x, weights, matrices, gates, ups = residuals
    weight_of_row = _rows(weights.reshape(-1), plan.choice)
    d_out = d_out.astype(x.dtype)

    def block(index: Int32[Array, ""], state: tuple) -> tuple:
        d_rows, d_weights, d_matrices = state
        expert = plan.expert[index]
        gate, up, down = _of_expert(matrices, expert, x.dtype)
        take, put = _slicer(index, block_rows)
        token, weight = take(plan.token), take(weight_of_row)[:, None]
        own, d_own = _rows(x, token), _rows(d_out, token)
        hidden, pull_back = jax.vjp(lambda gate, up: _hidden(gate, up, limit), take(gates), take(ups))
        d_hidden = _times_transposed(d_own, down).astype(jnp.float32)
        d_gate, d_up = pull_back(weight * d_hidden)
        changes = _outer(own, d_gate), _outer(own, d_up), _outer((weight * hidden).astype(x.dtype), d_own)
        d_x = _times_transposed(d_gate, gate) + _times_transposed(d_up, up)
        return (
            put(d_rows, d_x),
            put(d_weights, (hidden * d_hidden).sum(axis=-1)),
            Matrices(*(total.at[expert].add(change) for total, change in zip(d_matrices, changes, strict=True))),
        )

    rows = len(plan.token)
    d_matrices = jax.tree.map(jnp.zeros_like, matrices)
    state = jnp.zeros((rows, x.shape[1]), x.dtype), jnp.zeros(rows, jnp.float32), d_matrices
    d_rows, d_weights, d_matrices = jax.lax.fori_loop(0, plan.used, block, state)
    d_weights = _rows(d_weights, plan.place.reshape(-1)).reshape(weights.shape)
    return None, _summed(d_rows, plan).astype(x.dtype), d_weights, d_matrices


_by_blocks.defvjp(_by_blocks_forward, _by_blocks_backward)


def _ragged(
    x: Float[Array, "T E"], routing: Routing, matrices: Matrices, limit: float, block_rows: int
) -> Float32[Array, "T E"]:
    """By XLA's product of groups of rows with a matrix each."""
    del block_rows
    experts = len(matrices.gate)
    plan, counts = _plan(routing.ids, experts, 1), loads(routing.ids, experts)

    def times(rows: Float[Array, "R _"], matrix: Float32[Array, "X _ _"]) -> Float[Array, "R _"]:
        return jax.lax.ragged_dot(rows, matrix.astype(x.dtype), counts, precision=precision(x.dtype))

    own = _dispatch(x, plan)
    hidden = _hidden(times(own, matrices.gate), times(own, matrices.up), limit)
    hidden *= _rows(routing.weights.reshape(-1), plan.choice)[:, None]  # no row twice: its gradient adds nothing up
    return _combine(times(hidden.astype(x.dtype), matrices.down), plan)


@jax.custom_vjp
def _dispatch(x: Float[Array, "T E"], plan: _Plan) -> Float[Array, "R E"]:
    """Each row's token. Its gradient is `_combine`'s value, and the other way round: both gather."""
    return _rows(x, plan.token)


@jax.custom_vjp
def _combine(rows: Float[Array, "R E"], plan: _Plan) -> Float32[Array, "T E"]:
    return _summed(rows, plan)


_dispatch.defvjp(
    lambda x, plan: (_dispatch(x, plan), plan), lambda plan, d_rows: (_summed(d_rows, plan).astype(d_rows.dtype), None)
)
_combine.defvjp(
    lambda rows, plan: (_combine(rows, plan), (plan, jnp.zeros((), rows.dtype))),
    lambda kept, d_out: (_rows(d_out.astype(kept[1].dtype), kept[0].token), None),
)


def _hidden(gate: Float[Array, "rows I"], up: Float[Array, "rows I"], limit: float) -> Float32[Array, "rows I"]:
    return swiglu(gate.astype(jnp.float32), up.astype(jnp.float32), limit)


def _of_expert(matrices: Matrices, expert: Int32[Array, ""], dtype: Any) -> tuple[Float[Array, "_ _"], ...]:
    return tuple(matrix[expert].astype(dtype) for matrix in matrices)


def _slicer(index: Int32[Array, ""], block_rows: int) -> tuple[Callable, Callable]:
    """Functions that take a block's rows out of an array of all rows, and put them there."""

    def take(array: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, index * block_rows, block_rows)

    def put(array: Array, block: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(array, block, index * block_rows, axis=0)

    return take, put


def _times(rows: Float[Array, "rows i"], matrix: Float[Array, "i o"]) -> Float[Array, "rows o"]:
    return product("ri,io->ro", rows, matrix.astype(rows.dtype))


def _times_transposed(rows: Float[Array, "rows o"], matrix: Float[Array, "i o"]) -> Float[Array, "rows i"]:
    return product("ro,io->ri", rows, matrix)


def _outer(rows: Float[Array, "rows i"], d_out: Float[Array, "rows o"]) -> Float32[Array, "i o"]:
    return product("ri,ro->io", rows, d_out, jnp.float32)


_TABLE = {"dense": _dense, "blocks": _blocks, "ragged": _ragged}
