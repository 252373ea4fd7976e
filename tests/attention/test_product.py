"""float32 operands are multiplied as float32, in every program and on every platform."""

import ast
import pathlib
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from research.attention.attend import Documents, Target, platform
from research.attention.indexer import kernel as index_kernel
from research.attention.layer.attention import Attention
from research.attention.product import precision_name, product
from research.attention.spec import Spec
from research.attention.visibility import KINDS
from research.model import language_model
from research.settings.config import Settings
from tests.attention.backends import strategies as lib

ROOT = pathlib.Path(__file__).parents[2]
HIGHEST = (jax.lax.Precision.HIGHEST,) * 2
PRODUCTS = {"einsum", "dot", "matmul", "tensordot", "vdot", "inner", "outer", "vecdot", "dot_general", "Linear", "Conv"}


def test_products_are_made_in_one_place():
    found = []
    for path in (ROOT / "research").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Attribute) and node.attr in PRODUCTS
            if named or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)):
                found.append(path.name)
    assert set(found) == {"product.py"}


def products(jaxpr):
    """Every `dot_general` of a program, also those within its kernels."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


def imprecise(function, *arguments) -> tuple[int, list]:
    """How many products a program has, and those with a float32 operand that may round it."""
    found = list(products(jax.make_jaxpr(function)(*arguments).jaxpr))
    wide = [e for e in found if any(v.aval.dtype == jnp.float32 for v in e.invars)]
    return len(found), [str(e) for e in wide if e.params["precision"] != HIGHEST]


def imprecise_lines(function, platform, *arguments) -> tuple[int, list[str]]:
    """As `imprecise`, of the program as the compiler of a platform is given it."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    found = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    wide = [line for line in found if "f32>" in re.search(r": \((.*)\) ->", line)[1]]
    return len(found), [line for line in wide if "precision = [HIGHEST, HIGHEST]" not in line]


def small(backend="blockwise", platform="cpu", *, tied_head=True, **attention) -> Spec:
    sizes = {"window": 8, "hca_ratio": 16, "top_k": 3, "heads": 2, "head_width": 16, "rope_width": 8, "q_rank": 16}
    sizes |= {"out_rank": 8, "index_heads": 2, "index_head_width": 8}
    settings = Settings().replace(
        model={"hidden": 16, "ffn_width": 24, "tied_head": tied_head},
        attention={"backend": backend, **sizes, **attention},
    )
    return Spec.make(settings, platform)


def layer_gradients(kind, spec, seq_len=64):
    """Value and gradients of a layer, its indexer's loss among them, and abstract arguments."""

    @hk.transform
    def layer(x):
        out, of_indexer = Attention(spec, kind)(x, Documents.whole(1, seq_len))
        return out.sum() + sum(mean.mean() for mean in of_indexer.values())

    x = jax.ShapeDtypeStruct((1, seq_len, 16), jnp.float32)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)

    def run(params, x):
        return jax.value_and_grad(lambda params, x: layer.apply(params, None, x), (0, 1))(params, x)

    return run, params, x


@pytest.mark.parametrize("platform", ["tpu", pytest.param("cuda", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["blockwise", "dot_product"])
def test_a_layer_in_float32_rounds_no_operand(backend, kind, platform):
    """Forward and backward; blockwise alone has what the rule once left out: the teacher, projections, attention."""
    spec = small(backend, index_backend="xla")
    count, found = imprecise_lines(layer_gradients(kind, spec)[0], platform, *layer_gradients(kind, spec)[1:])
    assert count > 20
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("tied_head", [True, False])
def test_a_model_in_float32_rounds_no_operand(tied_head):
    spec = small(tied_head=tied_head)
    tokens = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    trained, measured = language_model.build(spec), language_model.build(spec, measure=True)
    params = jax.eval_shape(lambda key, t: trained.init(key, t, Documents(t, t)), jax.random.key(0), tokens)

    def loss(params, tokens):
        out = trained.apply(params, None, tokens, Documents(tokens, tokens))
        return out.logits.sum() + sum(mean.mean() for mean in out.means.values())

    count, found = imprecise(jax.value_and_grad(loss), params, tokens)
    assert count > 60
    assert not found
    count, found = imprecise(lambda p, t: measured.apply(p, None, t, Documents(t, t)), params, tokens)
    assert count > 20
    assert not found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_splash_hands_its_kernels_the_precision_that_it_records(kind, dtype):
    visibility = lib.visibilities(100, 128)[kind]
    target, strategy = Target("tpu"), lib.Strategy("splash")
    effective = strategy.attend(visibility, target).effective(lib.sizes(256, dtype))
    assert effective["precision"] == {"float32": "highest", "bfloat16": "default"}[dtype]
    arguments, d_out = lib.inputs(visibility, 256, dtype=jnp.dtype(dtype))
    run = lib.differentiated(strategy, visibility, target)
    count, found = imprecise(run, arguments, d_out)
    assert count >= 7  # of the forward and of the backward kernel
    assert not found or dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_indexers_kernel_has_the_same_rule(dtype):
    q, keys = jnp.zeros((1, 8, 2, 4), dtype), jnp.zeros((1, 8, 4), dtype)
    weights = jnp.zeros((1, 8, 2))

    def gradients(*arguments):
        return jax.grad(lambda *a: index_kernel.scores(1, 8, False, *a).sum(), (0, 1, 2))(*arguments)

    count, found = imprecise(gradients, q, keys, weights)
    assert count == 4
    assert not found


def test_bfloat16_stays_as_fast_as_it_is():
    a = jnp.ones((2, 3), jnp.bfloat16)
    (equation,) = products(jax.make_jaxpr(lambda a: product("ij,kj->ik", a, a, jnp.float32))(a).jaxpr)
    assert set(equation.params["precision"]) == {jax.lax.Precision.DEFAULT}
    assert equation.outvars[0].aval.dtype == jnp.float32
    assert [precision_name(dtype) for dtype in ("float32", "bfloat16")] == ["highest", "default"]


def test_precision_changes_no_bit_on_a_cpu():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((70, 70)), jnp.float32) for _ in range(2))
    exact, default = jax.jit(lambda a, b: product("ij,jk->ik", a, b)), jax.jit(jnp.matmul)
    if platform() == "cpu":
        np.testing.assert_array_equal(exact(a, b), default(a, b))
