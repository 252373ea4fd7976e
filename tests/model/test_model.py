import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from research.attention import backends
from research.attention.attend import Documents
from research.attention.spec import Spec
from research.model import language_model
from research.settings.config import Settings
from research.training import step as step_lib
from tests.oracles import assert_close

SEQ_LEN = 64
ALIGNMENT = 16  # a multiple of both ratios


@functools.cache
def spec(backend="blockwise", platform=None, schedule="auto", **model) -> Spec:
    """Every kind of layer, twice, all of them small enough for 64 tokens to leave windows and selections behind."""
    attention = {
        "backend": backend,
        "schedule": schedule,
        "window": 8,
        "hca_ratio": ALIGNMENT,
        "csa_ratio": 4,
        "top_k": 3,
        "heads": 2,
        "head_width": 16,
        "rope_width": 8,
        "q_rank": 16,
        "out_rank": 8,
        "index_heads": 2,
        "index_head_width": 8,
    }
    model = {"repeats": 2, "hidden": 32, "ffn_width": 48, **model}
    return Spec.make(Settings().replace(attention=attention, model=model), platform)


@functools.cache
def parameters(**model):
    """Large enough for every token to tell; freshly initialised, attention hardly does."""
    init = language_model.build(spec(**model)).init
    shapes = jax.eval_shape(init, jax.random.key(0), *row([0] * SEQ_LEN))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * 0.3, leaf.dtype), shapes)


@functools.cache
def jitted_apply(backend="blockwise", **model):
    apply = language_model.build(spec(backend, **model)).apply
    return jax.jit(lambda *arguments: apply(*arguments)[0])


def logits(arguments, params=None, **model) -> np.ndarray:
    return np.asarray(jitted_apply(**model)(parameters() if params is None else params, None, *arguments))


@functools.cache
def text(document: int) -> np.ndarray:
    """Random bytes, always the same for a document."""
    return np.random.default_rng(document).integers(0, 256, SEQ_LEN)


def row(segments):
    """Inputs [1, S] and documents of a row whose documents are `text` of their ids."""
    segments = np.array(segments)
    counts = {document: iter(range(SEQ_LEN)) for document in set(segments)}
    positions = np.array([next(counts[document]) if document >= 0 else 0 for document in segments])
    inputs = np.array([text(d)[p] if d >= 0 else 0 for d, p in zip(segments, positions, strict=True)])
    inputs, positions, segments = (jnp.asarray(array[None], jnp.int32) for array in (inputs, positions, segments))
    return inputs, Documents(positions, segments)


@pytest.mark.slow
def test_parameters_do_not_depend_on_the_backend():
    def shapes(backend):
        return jax.eval_shape(language_model.build(spec(backend)).init, jax.random.key(0), *row([0] * SEQ_LEN))

    trees = [shapes(backend) for backend in backends.NAMES]
    assert all(tree == trees[0] for tree in trees)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(trees[0]))

    def values(backend):
        init = language_model.build(spec(backend, layers=("csa",))).init
        return jax.jit(init)(jax.random.key(0), *row([0] * SEQ_LEN))

    jax.tree.map(np.testing.assert_array_equal, values("dot_product"), values("blockwise"))


@pytest.mark.parametrize(
    "backend", ["blockwise", *(pytest.param(x, marks=pytest.mark.slow) for x in ("joined", "splash"))]
)
def test_one_checkpoint_serves_every_backend(backend):
    arguments = row([0] * 20 + [1] * 30 + [-1] * 14)
    expected = logits(arguments, backend="dot_product")
    assert expected.shape == (1, SEQ_LEN, 257)
    assert_close(logits(arguments, backend=backend), expected, 1e-4)


@pytest.mark.slow
def test_program_does_not_grow_with_repeats():
    def equations(repeats):
        model = language_model.build(spec(repeats=repeats))
        shapes = jax.eval_shape(model.init, jax.random.key(0), *row([0] * SEQ_LEN))
        assert all(
            leaf.shape[0] == repeats
            for module, leaves in shapes.items()
            if "layer_stack" in module or "blocks" in module
            for leaf in leaves.values()
        )

        def loss(params):
            return model.apply(params, None, *row([0] * SEQ_LEN))[0].sum()

        return str(jax.make_jaxpr(jax.grad(loss))(shapes)).count("\n")

    assert equations(6) == equations(2)


def test_head_is_tied_or_a_parameter_of_its_own():
    tied, untied = parameters(), parameters(tied_head=False)
    (module,) = untied.keys() - tied.keys()
    assert untied[module].keys() == {"head"}
    embedding = tied["embed"]["embeddings"]
    assert untied[module]["head"].shape == embedding.T.shape
    # With the embedding's matrix in the head, both are the same function.
    arguments, params = row([0] * SEQ_LEN), {**tied, module: {"head": embedding.T}}
    assert_close(logits(arguments, params, tied_head=False), logits(arguments), 1e-5)


def test_bfloat16_keeps_parameters_and_logits_in_float32():
    model = {"backend": "dot_product", "layers": ("hca",)}  # for csa, a rounded score would select other entries
    arguments, params = row([0] * SEQ_LEN), parameters(layers=model["layers"])

    def loss(params):
        values = jitted_apply(**model, dtype="bfloat16")(params, None, *arguments)
        return jnp.mean(values**2), values

    gradients, rounded = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    assert_close(rounded, logits(arguments, params, **model), 0.03)
    assert (rounded != logits(arguments, params, **model)).any()


@pytest.mark.slow
def test_remat_does_not_change_gradients():
    arguments, layers = row([0] * 20 + [1] * 30 + [-1] * 14), ("csa",)

    def loss(params, remat):
        apply = language_model.build(spec("dot_product", layers=layers, remat=remat)).apply
        return jnp.mean(apply(params, None, *arguments)[0] ** 2)

    gradients, params = jax.jit(jax.grad(loss), static_argnums=1), parameters(layers=layers)
    with_remat, without = gradients(params, "block"), gradients(params, "none")
    jax.tree.map(lambda actual, expected: assert_close(actual, expected, 1e-5), with_remat, without)

    def recomputed(remat):  # the scores of the indexer always are, head by head
        return str(jax.make_jaxpr(loss, static_argnums=1)(params, remat)).count("remat")

    assert recomputed("block") == recomputed("none") + 1


def test_past_does_not_depend_on_the_future():
    inputs, documents = row([0] * SEQ_LEN)
    before = logits((inputs, documents))
    after = logits((inputs.at[0, 40].set(inputs[0, 40] ^ 1), documents))
    np.testing.assert_array_equal(after[:, :40], before[:, :40])
    assert (after[:, 40:] != before[:, 40:]).any(axis=-1).all()


def test_documents_of_a_row_are_as_if_alone_and_in_any_order():
    first, second = 20, 26
    pad = [-1] * (2 * ALIGNMENT - first)
    packed = logits(row([1] * first + pad + [2] * second + [-1] * 6))[0]
    swapped = logits(row([2] * second + [-1] * 6 + [1] * first + pad))[0]
    for document, length, start, start_swapped in ((1, first, 0, 32), (2, second, 32, 0)):
        alone = logits(row([document] * length + [-1] * (SEQ_LEN - length)))[0, :length]
        assert_close(packed[start : start + length], alone, 1e-5)
        assert_close(swapped[start_swapped : start_swapped + length], alone, 1e-5)
    assert np.abs(packed[:first] - packed[32 : 32 + first]).max() > 0.1


def test_padding_on_either_side_gives_the_same_log_probabilities():
    right = logits(row([3] * 40 + [-1] * 24))[0, :40]
    left = logits(row([-1] * ALIGNMENT + [3] * 40 + [-1] * 8))[0, ALIGNMENT : ALIGNMENT + 40]
    assert_close(jax.nn.log_softmax(left), jax.nn.log_softmax(right), 1e-5)


@pytest.mark.parametrize("backend", backends.NAMES)
def test_rows_known_to_be_one_document_are_that(backend):
    inputs, documents = row([0] * SEQ_LEN)
    known = logits((inputs, Documents.whole(1, SEQ_LEN)), backend=backend)
    assert_close(known, logits((inputs, documents), backend=backend), 1e-5)


@pytest.mark.parametrize(
    "schedule", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("static", "dynamic"))]
)
def test_training_lowers_for_a_tpu(schedule):
    """With a forward and a backward kernel at least; recomputed blocks have one more."""

    def kernels(remat):
        model = language_model.build(spec("splash", "tpu", schedule, remat=remat, dtype="bfloat16"))

        def loss(params):
            return model.apply(params, None, *row([0] * 40 + [1] * 24))[0].mean()

        lowered = jax.jit(jax.value_and_grad(loss)).trace(parameters()).lower(lowering_platforms=("tpu",))
        return lowered.as_text().count("tpu_custom_call")

    assert kernels("block") > kernels("none") >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [("cpu", "tpu", "cpu"), pytest.param(("tpu", "cpu", "tpu"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_one_process_makes_the_program_of_each_platform(order):
    """Of an update, the indexer's kernel and loss among it; whatever was traced before for another platform."""
    updates = {}
    for platform in order:
        model = spec("auto", platform)
        optimizer = optax.sgd(1.0)
        update = updates.setdefault(platform, step_lib.make_update(model, language_model.build(model), optimizer))
        state = jax.eval_shape(lambda m=model, o=optimizer: step_lib.init(m, o, 0))
        tokens = jax.ShapeDtypeStruct((1, SEQ_LEN), jnp.int32)
        batch = dict.fromkeys(("inputs", "targets", "positions", "segments"), tokens)
        lowered = jax.jit(update).trace(state, batch).lower(lowering_platforms=(platform,))
        assert model.backend == {"cpu": "blockwise", "tpu": "splash"}[platform]
        assert ("tpu_custom_call" in lowered.as_text()) == (platform == "tpu")
