import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention import backends
from research.attention.attend import Documents
from research.attention.layer.attention import Attention
from research.attention.spec import Spec
from research.attention.visibility import KINDS
from research.settings.attention import Rope
from research.settings.config import Settings
from tests.parity import cases
from tests.parity.cases import ATTENTION, HIDDEN

ROPE = Rope()
SMALL = dataclasses.replace(ATTENTION, window=8, hca_ratio=8, top_k=3)
ALL_ENTRIES = dataclasses.replace(SMALL, top_k=16)
S = 64  # of most tests: what is jitted below is compiled once for all of them
every_kind = pytest.mark.parametrize("kind", KINDS)


def attention(kind: str, settings=SMALL, dtype="float32") -> hk.Transformed:
    """A function of hidden states, positions and segments; without the latter, of rows of one document each."""

    def forward(x, positions, segments=None):
        if segments is None:
            documents = dataclasses.replace(Documents.whole(*x.shape[:2]), positions=positions)
        else:
            documents = Documents(positions, segments)
        return Attention(cases.spec(ROPE, settings, dtype), kind)(x, documents)[0]

    return hk.without_apply_rng(hk.transform(forward))


def grid(seq_len: int) -> jax.Array:
    return jnp.arange(seq_len, dtype=jnp.int32)[None]


def hidden_states(seq_len: int = S) -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).standard_normal((1, 512, HIDDEN))[:, :seq_len], jnp.float32)


@functools.cache
def random_parameters(kind: str, settings=SMALL) -> hk.Params:
    """Large enough to tell: freshly initialised gates and projections hardly differ between tokens."""
    shapes = jax.eval_shape(attention(kind, settings).init, jax.random.key(0), hidden_states(1), grid(1))
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * 0.5, leaf.dtype), shapes)


@functools.cache
def jitted_apply(kind: str, settings):
    return jax.jit(attention(kind, settings).apply)


@functools.cache
def jitted_gradients(kind: str, settings):
    @jax.jit
    def gradients(parameters, x, positions, segments, rows):
        """[rows, S, E]: of a weighted sum of each output row, by x."""
        out, pull_back = jax.vjp(lambda x: attention(kind, settings).apply(parameters, x, positions, segments), x)
        picked = jnp.einsum("rs,e->rse", jax.nn.one_hot(rows, out.shape[1]), jnp.arange(1.0, HIDDEN + 1))
        return jax.vmap(pull_back)(picked[:, None])[0][:, 0]

    return gradients


def arguments(x, segments, positions):
    """By default one document, and positions that count tokens."""
    segments = [0] * x.shape[1] if segments is None else segments
    return x, grid(x.shape[1]) if positions is None else positions, jnp.array([segments], jnp.int32)


def run(kind: str, x, segments=None, positions=None, settings=SMALL) -> np.ndarray:
    out = jitted_apply(kind, settings)(random_parameters(kind, settings), *arguments(x, segments, positions))
    assert np.isfinite(out).all()
    return np.asarray(out)


def reached(kind: str, x, *rows: int, segments=None, positions=None, settings=SMALL) -> np.ndarray:
    """Bool [rows, S]: which tokens an output row depends on by its gradient."""
    gradients = jitted_gradients(kind, settings)(
        random_parameters(kind, settings), *arguments(x, segments, positions), jnp.array(rows)
    )
    assert np.isfinite(gradients).all()
    return np.abs(gradients).max(-1) > 0


@pytest.mark.slow
@every_kind
def test_parameters_depend_on_neither_length_nor_backend(kind):
    def shapes(backend, seq_len):
        init = attention(kind, dataclasses.replace(ATTENTION, backend=backend)).init
        return jax.eval_shape(init, jax.random.key(0), hidden_states(seq_len), grid(seq_len))

    expected = shapes("dot_product", 512)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(expected))
    for backend in backends.NAMES:
        for seq_len in (1, 127, 489):
            assert shapes(backend, seq_len) == expected, (backend, seq_len)


def test_sinks_can_be_left_out():
    init = attention("sliding", dataclasses.replace(SMALL, sinks=False)).init
    expected = random_parameters("sliding")["attention"].keys() - {"sinks"}
    assert jax.eval_shape(init, jax.random.key(0), hidden_states(4), grid(4))["attention"].keys() == expected


def test_initial_values():
    settings = dataclasses.replace(ATTENTION, q_rank=64)
    parameters = jax.jit(attention("csa", settings).init)(jax.random.key(0), hidden_states(8), grid(8))
    for module, name, leaf in hk.data_structures.traverse(parameters):
        if name in ("sinks", "position_bias"):
            assert not leaf.any(), (module, name)
        elif name == "scale":
            assert (leaf == 1).all(), (module, name)
        else:
            assert 0.01 < jnp.std(leaf) < 0.03, (module, name)
    assert abs(jnp.std(parameters["attention"]["q_up"]) - 0.02) < 1e-3


@every_kind
def test_no_segments_means_one_document(kind):
    without = jax.jit(attention(kind).apply)(random_parameters(kind), hidden_states(), grid(S))
    np.testing.assert_allclose(without, run(kind, hidden_states()), atol=1e-6)


@every_kind
def test_an_unfinished_window_changes_nothing(kind):
    x = hidden_states(512)
    part, whole = run(kind, x[:, :489], settings=ATTENTION), run(kind, x, settings=ATTENTION)
    np.testing.assert_allclose(part, whole[:, :489], atol=1e-5)


@every_kind
def test_a_token_leaves_the_past_alone(kind):
    x = hidden_states()
    before, after = run(kind, x), run(kind, x.at[:, 50].add(10.0))
    np.testing.assert_array_equal(before[:, :50], after[:, :50])
    assert (np.abs(before - after)[0, 50:58].max(-1) > 0).all()  # the window


@every_kind
def test_no_gradient_comes_from_the_future(kind):
    rows = (0, 7, 31, 40)
    for row, tokens in zip(rows, reached(kind, hidden_states(), *rows), strict=True):
        assert not tokens[row + 1 :].any()
        assert tokens[max(row - 7, 0) : row + 1].all()


def test_beyond_the_window_only_entries_reach():
    """W=8, S=64: row 63 sees 56..63, and token 0 only through an entry."""
    rows = (60, 61, 62, 63)
    tokens = reached("sliding", hidden_states(), *rows)[3]
    assert np.flatnonzero(tokens).tolist() == list(range(56, 64))
    for kind in ("hca", "csa"):
        tokens = reached(kind, hidden_states(), *rows, settings=ALL_ENTRIES)
        assert np.flatnonzero(tokens[2]).tolist() == list(range(63))
        assert tokens[3].all()


@every_kind
def test_a_document_that_starts_inside_a_window_keeps_to_itself(kind):
    """CSA, R=4: window 1 straddles, and entry 2 must not mix in its tokens."""
    segments, x = [0] * 6 + [1] * (S - 6), hidden_states()
    before, after = run(kind, x, segments), run(kind, x.at[:, :6].add(10.0), segments)
    np.testing.assert_array_equal(before[:, 6:], after[:, 6:])
    assert not reached(kind, x, 6, 11, 15, 63, segments=segments)[:, :6].any()


@every_kind
def test_a_straddling_window_belongs_to_nobody(kind):
    segments, x = [0] * 200 + [1] * 289, hidden_states(489)
    out = run(kind, x, segments, settings=ATTENTION)
    for changed, kept in ((slice(200), slice(200, 489)), (slice(200, 489), slice(200))):
        after = run(kind, x.at[:, changed].add(10.0), segments, settings=ATTENTION)
        np.testing.assert_array_equal(out[:, kept], after[:, kept])


@every_kind
def test_aligned_documents_equal_themselves_alone(kind):
    documents = (slice(21), slice(24, 59))  # both starts are multiples of both ratios; padding in between
    segments, positions, x = np.full(S, -1), np.zeros((1, S), np.int32), hidden_states()
    for document, tokens in enumerate(documents):
        segments[tokens] = document
        positions[0, tokens] = np.arange(len(positions[0, tokens]))
    packed = run(kind, x, segments, jnp.asarray(positions))
    alone = jitted_apply(kind, SMALL)
    for tokens in documents:
        part = x[:, tokens]
        expected = alone(random_parameters(kind), part, grid(part.shape[1]))
        np.testing.assert_allclose(packed[:, tokens], expected, atol=1e-5)


def test_restarting_positions_do_not_hide_entries():
    """[0]*256 + [1]*256: row 400 sees entry 2, its only way to tokens 256..272."""
    positions = jnp.concatenate([grid(256), grid(256)], axis=1)
    segments = [0] * 256 + [1] * 256
    [tokens] = reached("hca", hidden_states(512), 400, segments=segments, positions=positions, settings=ATTENTION)
    assert np.flatnonzero(tokens).tolist() == list(range(256, 401))


@every_kind
def test_padding_outputs_zero_and_reaches_nobody(kind):
    segments = [-1] * 3 + [0] * 17 + [-1] * (S - 20)
    padding = np.array(segments) < 0
    x = hidden_states().at[:, padding].set(0.0)
    out = run(kind, x, segments)
    np.testing.assert_array_equal(out[:, padding], 0.0)
    np.testing.assert_array_equal(out, run(kind, x.at[:, padding].add(10.0), segments))
    tokens = reached(kind, x, 1, 10, 19, 40, segments=segments)
    assert tokens.any(-1).tolist() == [False, True, True, False]
    assert not tokens[:, padding].any()


@every_kind
def test_only_relative_positions_matter(kind):
    """What the inverse rotation of the output is for; at the last position that there is as well as at the first."""
    x = hidden_states()
    here, stretched = (run(kind, x, positions=at) for at in (grid(S), grid(S) * 2))
    for shift in (5_000, 1_000_000, 2**31 - S):
        there = run(kind, x, positions=grid(S) + shift)
        np.testing.assert_allclose(here, there, rtol=0, atol=1e-5 * np.abs(here).max())
    assert np.abs(here - stretched).max() > 1e-2 * np.abs(here).max()


def test_the_loss_gives_the_indexer_no_gradient():
    parameters, x = random_parameters("csa"), hidden_states()

    def loss(parameters):
        return jnp.square(attention("csa").apply(parameters, x, grid(S))).sum()

    for module, name, gradient in hk.data_structures.traverse(jax.jit(jax.grad(loss))(parameters)):
        assert gradient.any() != ("indexer" in module), (module, name)


@pytest.mark.slow
@every_kind
def test_heads_in_groups_are_the_same_heads(kind):
    def gradients(settings):
        def loss(parameters, x):
            return jnp.sum(attention(kind, settings).apply(parameters, x, grid(S)) ** 2)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(random_parameters(kind), hidden_states())

    blockwise = dataclasses.replace(SMALL, backend="blockwise")
    whole = gradients(blockwise)
    grouped = gradients(dataclasses.replace(blockwise, heads_at_once=SMALL.heads // SMALL.out_groups))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()), grouped, whole)


def test_heads_in_groups_take_less_memory():
    def temp_bytes(at_once):
        settings = dataclasses.replace(SMALL, backend="blockwise", heads=16, out_groups=8, heads_at_once=at_once)
        layer = attention("hca", settings)
        arguments = jax.ShapeDtypeStruct((1, 2048, HIDDEN), jnp.float32), grid(2048)
        parameters = jax.eval_shape(layer.init, jax.random.key(0), *arguments)
        loss = jax.grad(lambda *arguments: layer.apply(*arguments).sum(), argnums=(0, 1))
        return jax.jit(loss).lower(parameters, *arguments).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(2) < 0.6 * temp_bytes(0)


def test_queries_are_normed_twice_and_keys_once():
    """The low-rank query as a whole, every head on its own without a scale, the shared key-value head."""
    parameters, x = random_parameters("sliding"), hidden_states()
    apply = jitted_apply("sliding", SMALL)
    segments = jnp.zeros_like(grid(S))
    expected = apply(parameters, x, grid(S), segments)
    one_head = jnp.repeat(jnp.array([1.0, 50.0, 1.0, 1.0]), SMALL.head_width)
    for name, factor in {"q_down": 50.0, "q_up": one_head[None], "kv": 50.0}.items():
        layer = parameters["attention"] | {name: parameters["attention"][name] * factor}
        out = apply(parameters | {"attention": layer}, x, grid(S), segments)
        np.testing.assert_allclose(out, expected, atol=1e-4)
    assert "attention/head_norm" not in parameters


@every_kind
def test_bfloat16_computes_low_and_keeps_parameters_high(kind):
    """With all entries selected, since a rounded score may change the choice."""
    x = hidden_states()
    layer, parameters = attention(kind, ALL_ENTRIES, "bfloat16"), random_parameters(kind, ALL_ENTRIES)
    low, high = jax.jit(layer.apply)(parameters, x, grid(S)), run(kind, x, settings=ALL_ENTRIES)
    assert low.dtype == jnp.bfloat16
    error = np.abs(low.astype(jnp.float32) - high)
    assert error.max() < 2**-4 * np.abs(high).max()
    assert error.mean() < 2**-7 * np.abs(high).max()
    made = jax.eval_shape(layer.init, jax.random.key(0), x, grid(S))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(made))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((np.zeros((1, 4, HIDDEN + 1)), grid(4)), r"x: shape \[1, 4, 17\], must be \[B, S, 16\]"),
        ((hidden_states(4), grid(5)), r"documents.positions: int32 \[1, 5\], must be int32 \[1, 4\]"),
        ((hidden_states(4), grid(4) * 1.0), r"documents.positions: float32 \[1, 4\], must be int32 \[1, 4\]"),
        ((hidden_states(4), grid(4), grid(4)[0]), r"documents.segments: int32 \[4\], must be int32 \[1, 4\]"),
        ((hidden_states(4), grid(4), grid(4) > 0), r"documents.segments: bool \[1, 4\], must be int32 \[1, 4\]"),
    ],
)
@every_kind
@pytest.mark.usefixtures("unchecked_shapes")
def test_refuses_wrong_arguments(kind, inputs, message):
    with pytest.raises(ValueError, match=message):
        attention(kind).init(jax.random.key(0), *inputs)


def test_refuses_an_unknown_kind():
    with pytest.raises(ValueError, match=r"model.layers=\('hcaa',\): must be .* among sliding, hca, csa"):
        Spec.make(Settings().replace(model={"layers": ("hcaa",)}))
