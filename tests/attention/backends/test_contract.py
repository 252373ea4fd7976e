"""One suite for everything that computes attention; a new backend or schedule is covered once it is in its table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention import backends
from research.attention.backends.splash import schedules
from research.attention.visibility import KINDS
from research.settings.attention import Kernel
from tests.attention.backends import strategies as lib
from tests.oracles import assert_close, attention, visible

LENGTHS = (1, 3, 127, 128, 129, 255, 382, 489, 509, 1017)
FULL = lib.visibilities(window=128, hca_ratio=128)
SEQ_LEN = 512
SMALL = lib.visibilities(window=100, hca_ratio=64)


SETTINGS = ((lib.documents, True), (lib.padding, True), (lib.none, False), (lib.documents, False), (lib.none, True))


def steps_unset(strategy):
    return strategy.options.dq_reduction_steps == 0


def cases():
    """By default a diagonal of lengths and settings, with -m slow nearly all: a kernel takes seconds to compile."""
    found, numbers = [], {name: {} for name in backends.NAMES}
    for kind, visibility in FULL.items():
        for index, seq_len in enumerate(LENGTHS):
            for strategy in lib.strategies(visibility, seq_len, block=512 if seq_len > 489 else 128):
                if kind == "sliding" and not steps_unset(strategy):
                    continue  # HCA's local part is all of sliding attention: here, one way to reduce dq is enough
                known = numbers[strategy.backend]
                number = known.setdefault((kind, str(strategy)), len(known))
                on_diagonal = (index - number) % (20 if strategy.interpreted else 2) == 0
                for setting, (packing, sinks) in enumerate(SETTINGS):
                    name = f"{strategy}-{kind}-{seq_len}-{packing.__name__}-{'sinks' if sinks else 'bare'}"
                    quick = on_diagonal and setting == (number + index) % len(SETTINGS)
                    marks = () if quick else pytest.mark.slow
                    if quick or setting < 3 or not strategy.interpreted:
                        found.append(pytest.param(strategy, visibility, seq_len, packing, sinks, id=name, marks=marks))
    return found


def test_nothing_is_left_out():
    assert set(SMALL) == set(KINDS)
    for kind, visibility in SMALL.items():
        found = lib.strategies(visibility, SEQ_LEN)
        assert {strategy.backend for strategy in found} == set(backends.NAMES)
        able = set(schedules.expressing(kind))
        assert {strategy.options.schedule for strategy in found if strategy.backend == "splash"} == able
    quick = [case.values for case in cases() if not case.marks]
    for backend in backends.NAMES:
        lengths, packings = zip(*[(case[2], case[3:]) for case in quick if case[0].backend == backend], strict=True)
        assert set(lengths) == set(LENGTHS)
        assert set(packings) == set(SETTINGS)


@pytest.mark.parametrize(("strategy", "visibility", "seq_len", "packing", "sinks"), cases())
def test_equals_float64_loops(strategy, visibility, seq_len, packing, sinks):
    arguments, d_out = lib.inputs(visibility, seq_len, packing(seq_len), sinks=sinks, batch=2)
    results = of_length(strategy, visibility, seq_len)(arguments, d_out)
    compare(results, expected(visibility, seq_len, packing, sinks))


@functools.lru_cache(maxsize=1)
def of_length(strategy, visibility, seq_len):
    """Forgets the programs of a length with the next one: all of them do not fit into a process."""
    del seq_len
    return lib.differentiated.__wrapped__(strategy, visibility)


@functools.lru_cache(maxsize=len(SETTINGS))
def expected(visibility, seq_len, packing, sinks):
    arguments, d_out = lib.inputs(visibility, seq_len, packing(seq_len), sinks=sinks, batch=2)
    return attention(arguments, visibility, d_out)


def compare(results, right, out_tolerance=2e-5, gradient_tolerance=1e-4):
    """Also that rows which see nothing, and keys that nobody sees, are exactly 0, as are their gradients."""
    assert results.keys() == right.keys()
    for name, array in right.items():
        if name == "compressed" and array.shape[1] == 0:
            assert results[name].shape == array.shape
            continue
        # A query with a single key has no gradient; what is left of it in float32 is compared with the outputs' 1.
        assert_close(results[name], array, out_tolerance if name == "out" else gradient_tolerance, atol=1e-6)
        unseen = ~(right["out"] if name == "q" else array).astype(bool).any(axis=tuple(range(2, array.ndim)))
        assert not np.asarray(results[name])[unseen].any(), f"{name}: not exactly 0"


# One shape for all that follows, so that each strategy is compiled once.
every_strategy = pytest.mark.parametrize(
    ("strategy", "visibility"),
    lib.parameters(
        SMALL,
        SEQ_LEN,
        quick=lambda kind, strategy: (
            lib.is_default(kind, strategy) or (kind == "hca" and strategy.backend == "splash" and steps_unset(strategy))
        ),
    ),
)


@every_strategy
def test_blocks_of_nothing_but_padding(strategy, visibility):
    arguments, d_out = lib.inputs(visibility, SEQ_LEN, lib.blank_blocks(SEQ_LEN))
    results = lib.differentiated(strategy, visibility)(arguments, d_out)
    compare(results, attention(arguments, visibility, d_out))
    assert not np.asarray(results["out"])[:, 130:386].any()


def has_default_schedule(kind, strategy):
    return lib.is_default(kind, strategy) and not strategy.options.heads_per_call and steps_unset(strategy)


# Sinks enter where all schedules are alike: by default one of them stands for the others.
every_way_of_sinks = pytest.mark.parametrize(
    ("strategy", "visibility"), lib.parameters(SMALL, SEQ_LEN, quick=has_default_schedule)
)
INFINITE = float("inf")
SINKS = [(-INFINITE, 0.5), (-INFINITE, -INFINITE), (-3.0e38, 3.0e38), (1e30, -1e30), (-2.4e38, 2.4e38)]


@functools.cache
def expected_with(sinks, visibility):
    arguments, d_out = lib.inputs(visibility, SEQ_LEN, lib.blank_blocks(SEQ_LEN))
    return attention({**arguments, "sinks": np.array(sinks, np.float32)}, visibility, d_out)


@every_way_of_sinks
def test_sinks_of_any_size(strategy, visibility):
    """-inf is no sink; what is below or above all logits is that, also where float32 ends; with packing and padding."""
    arguments, d_out = lib.inputs(visibility, SEQ_LEN, lib.blank_blocks(SEQ_LEN))
    run = lib.differentiated(strategy, visibility)
    for sinks in SINKS:
        results = run({**arguments, "sinks": jnp.array(sinks, jnp.float32)}, d_out)
        compare(results, expected_with(sinks, visibility))
        ignored = np.array(sinks) < -1e29
        assert not np.asarray(results["sinks"])[ignored].any(), f"{sinks}: a gradient of what is ignored"


@every_way_of_sinks
def test_a_sink_that_is_no_number_is_never_hidden(strategy, visibility):
    """NaN and +inf: in every row that sees something, of that head alone."""
    arguments, d_out = lib.inputs(visibility, SEQ_LEN, lib.blank_blocks(SEQ_LEN))
    run, seen = lib.differentiated(strategy, visibility), np.asarray(lib.blank_blocks(SEQ_LEN)) >= 0
    good = np.asarray(run({**arguments, "sinks": jnp.zeros(2)}, d_out)["out"])
    for bad in (np.nan, INFINITE):
        out = np.asarray(run({**arguments, "sinks": jnp.array((bad, 0.0), jnp.float32)}, d_out)["out"])
        assert np.isnan(out[seen][:, 0]).all()
        np.testing.assert_array_equal(out[:, :, 1], good[:, :, 1])


@pytest.mark.parametrize(
    ("strategy", "visibility"), lib.parameters({"csa": SMALL["csa"]}, SEQ_LEN, quick=lambda _, s: steps_unset(s))
)
def test_of_more_selected_entries_than_top_k_the_first_are_attended(strategy, visibility):
    """Of those that a query sees: what is selected but hidden takes nobody's place. Everything selected, and half."""
    segments = lib.blank_blocks(SEQ_LEN)
    arguments, d_out = lib.inputs(visibility, SEQ_LEN, segments)
    for share in (1.0, 0.5):
        chosen = np.random.default_rng(0).random(arguments["selected"].shape) < share
        over = {**arguments, "selected": jnp.asarray(chosen)}
        compare(lib.differentiated(strategy, visibility)(over, d_out), attention(over, visibility, d_out))


def change(arguments, tokens: slice, entries: slice):
    """Other queries and keys at those tokens, other entries there."""
    changed = dict(arguments)
    for name, part in (("q", tokens), ("local", tokens), ("compressed", entries)):
        changed[name] = arguments[name].at[:, part].multiply(-1.7)
    return changed


@every_strategy
def test_past_does_not_depend_on_the_future(strategy, visibility):
    arguments, d_out = lib.inputs(visibility, SEQ_LEN, np.zeros((1, SEQ_LEN)))
    run, start = lib.differentiated(strategy, visibility), 300
    before = run(arguments, d_out)["out"]
    after = run(change(arguments, slice(start, None), slice(visibility.num_entries(start), None)), d_out)["out"]
    np.testing.assert_array_equal(after[:, :start], before[:, :start])
    assert (after[:, start:] != before[:, start:]).any(axis=(2, 3)).all()


@every_strategy
def test_document_does_not_depend_on_the_one_before(strategy, visibility):
    start = 200  # within entry 3 of HCA
    segments = np.arange(SEQ_LEN)[None] >= start
    arguments, d_out = lib.inputs(visibility, SEQ_LEN, segments)
    run = lib.differentiated(strategy, visibility)
    before = run(arguments, d_out)["out"]
    after = run(change(arguments, slice(start), slice(visibility.num_entries(start - 1) + 1)), d_out)["out"]
    np.testing.assert_array_equal(after[:, start:], before[:, start:])
    assert (after[:, :start] != before[:, :start]).any(axis=(2, 3)).all()


@every_strategy
@pytest.mark.parametrize(("packing", "row"), [(lib.documents, 300), (lib.blank_blocks, 511)])
def test_gradients_of_a_row_reach_exactly_what_it_sees(strategy, visibility, packing, row):
    """Causality, the window, documents and selection at once."""
    segments = packing(SEQ_LEN)[:1]
    arguments, d_out = lib.inputs(visibility, SEQ_LEN, segments)
    results = lib.differentiated(strategy, visibility)(arguments, jnp.zeros_like(d_out).at[:, row].set(1.0))
    reached = np.concatenate([np.asarray(results[name]).any(axis=-1)[0] for name in ("local", "compressed")])
    selected = None if arguments["selected"] is None else np.asarray(arguments["selected"][0])
    np.testing.assert_array_equal(reached, visible(visibility, segments[0], selected)[row])
    assert np.flatnonzero(np.asarray(results["q"]).any(axis=(0, 2, 3))).tolist() == [row]


default_strategies = pytest.mark.parametrize(
    ("strategy", "visibility"),
    lib.parameters(SMALL, SEQ_LEN, quick=lambda kind, strategy: kind != "sliding" and lib.is_default(kind, strategy)),
)


def log_sums(exact, visibility) -> np.ndarray:
    """[S, H]: of one sequence, the logarithm of all that a row's softmax divides by."""
    keys = np.concatenate([exact["local"][0], exact["compressed"][0]])
    selected = None if exact["selected"] is None else exact["selected"][0]
    mask = visible(visibility, exact["segments"][0], selected)[:, None]
    logits = np.where(mask, exact["q"][0] @ keys.T / np.sqrt(keys.shape[-1]), -INFINITE)
    return np.logaddexp(np.logaddexp.reduce(logits, axis=-1), exact["sinks"])


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@default_strategies
def test_bfloat16(strategy, visibility):
    """Weights, their gradients and the results have 8 bits; logits and sinks all 24, at any width of the heads.

    Neither 1 / sqrt(32) nor log2(e) fits into 8: no query may be multiplied by them before it meets the keys.
    """
    arguments, d_out = lib.inputs(visibility, 255, lib.documents(255)[:1], dtype=jnp.bfloat16, width=32)
    results, kept = jax.jit(functools.partial(lib.differentiate, strategy, visibility))(arguments, d_out)
    compare(results, attention(arguments, visibility, d_out), out_tolerance=5e-3, gradient_tolerance=1e-2)

    exact = {name: None if x is None else np.asarray(x) for name, x in arguments.items()}
    exact |= {name: exact[name].astype(np.float64) for name in ("q", "local", "compressed")}
    right = attention(exact, visibility, d_out)
    errors = {
        name: rms(np.asarray(x, np.float64) - right[name]) / rms(right[name])
        for name, x in results.items()
        if right[name].size
    }
    for name, bound in {"out": 2e-3, "q": 3.5e-3, "local": 3.5e-3, "compressed": 3.5e-3}.items():
        assert errors.get(name, 0.0) < bound, errors
    if all(x.size < right["out"].shape[1] ** 2 for x in kept):  # else the weights themselves
        [logsumexp] = [np.asarray(x[0]) for x in kept if x.dtype == jnp.float32 and x.ndim == 3]
        logsumexp = logsumexp.T if len(logsumexp) == lib.HEADS else logsumexp
        np.testing.assert_allclose(logsumexp[:255], log_sums(exact, visibility), rtol=0, atol=3e-6)


BLOCKS = {
    "wide keys": {"block_q": 128, "block_kv": 256, "block_kv_compute": 128, "block_q_dkv": 256, "block_kv_dkv": 128},
    "wide queries": {"block_q": 256, "block_kv": 128, "block_q_dkv": 128, "block_kv_dkv": 384},
}


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(
    ("kind", "steps"), [("hca", 0), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("hca", 3), ("csa", 0)))]
)
def test_backward_blocks_of_other_sizes(kind, steps, blocks):
    """Splash's alone."""
    options = Kernel(dq_reduction_steps=steps, block_kv_dkv_compute=128, **blocks)
    arguments, d_out = lib.inputs(SMALL[kind], 489, lib.documents(489)[:1])
    results = lib.differentiated(lib.Strategy("splash", options), SMALL[kind])(arguments, d_out)
    compare(results, attention(arguments, SMALL[kind], d_out))


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("backend", [name for name in backends.NAMES if name != "splash"])
def test_no_intermediate_is_nan_or_infinite(backend, kind, sinks):
    """The memory that splash is interpreted with is NaN where nothing was written, which is its own test of this."""
    arguments, d_out = lib.inputs(SMALL[kind], 64, lib.padding(64), sinks=sinks)
    with jax.debug_nans(True), jax.debug_infs(True):
        results = lib.differentiated(lib.Strategy(backend), SMALL[kind])(arguments, d_out)
    compare(results, attention(arguments, SMALL[kind], d_out))
