"""Everything that computes attention, made from the tables of backends and schedules, and what to try it on."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention import attend as attend_lib
from research.attention import backends
from research.attention.attend import Attend, Documents, Keys, Sizes, Target
from research.attention.backends import blockwise, joined
from research.attention.backends.splash import schedules
from research.attention.visibility import KINDS, Visibility
from research.settings.attention import Attention, Kernel
from tests.oracles import DIFFERENTIABLE

HEADS = 2
WIDTH = 16
GROUPED = ("dynamic", "closed_form")  # schedules that are also tried with the heads one by one


def visibilities(window: int, hca_ratio: int, csa_ratio: int = 4) -> dict[str, Visibility]:
    """One of every kind."""
    settings = Attention(window=window, hca_ratio=hca_ratio, csa_ratio=csa_ratio, top_k=24)
    return {kind: cls.make(settings) for kind, cls in KINDS.items()}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A backend with its options."""

    backend: str
    options: Kernel = dataclasses.field(default_factory=Kernel)

    def attend(self, visibility: Visibility, target: Target | None = None) -> Attend:
        return Attend(self.backend, visibility, self.options, target or Target(attend_lib.platform()))

    @property
    def interpreted(self) -> bool:
        """Whether its kernels are, here: these take seconds."""
        return self.backend == "splash" or self.options.flash_kernel == "triton"

    def __str__(self) -> str:
        if self.backend == "joined":
            names = (self.backend, self.options.flash_kernel, self.options.schedule)
            return "-".join(name for name in names if name != "auto")
        if self.options.schedule == "auto":
            return self.backend
        apart = "-apart" if self.options.heads_per_call else ""
        return f"{self.backend}-{self.options.schedule}-dq{self.options.dq_reduction_steps}{apart}"


def sizes(seq_len: int, dtype="float32", packed=True) -> Sizes:
    """Of `inputs`."""
    return Sizes(seq_len, HEADS, WIDTH, dtype, packed)


def strategies(visibility: Visibility, seq_len: int, block: int = 128) -> list[Strategy]:
    """Those that differ in effect, for every backend: with schedules and blocks where it has them, else without."""
    asked = [
        Kernel(schedule, block_q=block, block_kv=block, dq_reduction_steps=steps)
        for schedule in schedules.TABLE
        for steps in (0, 3)
    ]
    asked += [dataclasses.replace(asked[2 * list(schedules.TABLE).index(name)], heads_per_call=1) for name in GROUPED]
    asked += [Kernel(schedule) for schedule in blockwise.SCHEDULES]
    kernels = ("xla", "triton")
    asked += [Kernel(way, flash_kernel=name) for name in kernels for way in ("auto", *joined.SCHEDULES)]
    found = []
    for name in backends.NAMES:
        distinct = {}
        for options in asked:
            with contextlib.suppress(ValueError):
                effective = Strategy(name, options).attend(visibility).effective(sizes(seq_len))
                distinct.setdefault(tuple(effective.items()), Strategy(name, options))
        found += distinct.values() or [Strategy(name)]
    return found


def parameters(by_kind: dict[str, Visibility], seq_len: int, quick: Callable[[str, Strategy], bool]) -> list:
    """Every (strategy, visibility) for `pytest.mark.parametrize`; slow where not `quick(kind, strategy)`."""
    return [
        pytest.param(
            strategy,
            visibility,
            id=f"{strategy}-{kind}",
            marks=() if quick(kind, strategy) else pytest.mark.slow,
        )
        for kind, visibility in by_kind.items()
        for strategy in strategies(visibility, seq_len)
    ]


def is_default(kind: str, strategy: Strategy) -> bool:
    """Whether it has the schedule that is chosen for that kind, or none."""
    auto = Strategy("splash").attend(KINDS[kind].make(Attention()))
    if strategy.backend == "joined":
        return not strategy.interpreted
    return strategy.backend != "splash" or strategy.options.schedule in ("auto", schedules.chosen(auto))


def none(seq_len: int) -> None:
    return None


def documents(seq_len: int) -> np.ndarray:
    """Two rows of documents that start anywhere; ids rise in one and fall in the other, which ends in padding."""
    t = np.arange(seq_len)
    falling = np.array([4, 1, -1])[np.digitize(t, [seq_len // 2, seq_len - seq_len // 10])]
    return np.stack([np.digitize(t, [seq_len // 3, seq_len - seq_len // 5]), falling])


def padding(seq_len: int) -> np.ndarray:
    """A row padded on both sides and between its documents, and one of nothing but padding."""
    t = np.arange(seq_len)
    padded = np.digitize(t, [seq_len // 4, seq_len // 2, seq_len // 2 + seq_len // 8, seq_len - seq_len // 5])
    return np.stack([np.array([-1, 0, -1, 1, -1])[padded], np.full(seq_len, -1)])


def blank_blocks(seq_len: int) -> np.ndarray:
    """Padding alone fills whole blocks of 128, first of local keys and then of queries."""
    del seq_len
    return np.array([[0] * 130 + [-1] * 256 + [1] * 126])


def inputs(
    visibility: Visibility, seq_len: int, segments=None, *, sinks=True, batch=1, dtype=jnp.float32, seed=0, width=WIDTH
):
    """Random arguments of `attend`, and a cotangent. Keys lie within [-1, 1], and so do outputs."""
    rng = np.random.default_rng(seed)
    batch = batch if segments is None else len(segments)
    entries = visibility.num_entries(seq_len)
    arguments = {
        "q": jnp.asarray(3 * rng.standard_normal((batch, seq_len, HEADS, width)), dtype),
        "local": jnp.asarray(rng.uniform(-1, 1, (batch, seq_len, width)), dtype),
        "compressed": jnp.asarray(rng.uniform(-1, 1, (batch, entries, width)), dtype),
        "sinks": jnp.asarray(rng.standard_normal(HEADS), jnp.float32) if sinks else None,
        "segments": None if segments is None else jnp.asarray(segments, jnp.int32),
        "selected": None,
    }
    if visibility.selects:
        rank = rng.random((batch, seq_len, entries)).argsort(axis=-1)
        arguments["selected"] = jnp.asarray(rank < visibility.top_k)
    return arguments, jnp.asarray(rng.standard_normal((batch, seq_len, HEADS, width)), dtype)


def placed(arguments) -> Documents:
    """Without segments, rows of one document each."""
    batch, seq_len = arguments["q"].shape[:2]
    if arguments["segments"] is None:
        return Documents.whole(batch, seq_len)
    return Documents(jnp.zeros((batch, seq_len), jnp.int32), arguments["segments"])


def call(attend: Attend, arguments, prepared=None) -> jax.Array:
    """The op on arguments as `inputs` gives them."""
    given = {name: arguments[name] for name in ("sinks", "selected")}
    keys = Keys(arguments["local"], arguments["compressed"])
    return attend(arguments["q"], keys, placed(arguments), **given, prepared=prepared)


def differentiate(strategy: Strategy, visibility: Visibility, arguments, d_out, target=None):
    """ "out" and the gradients, as `oracles.attention` returns them; and all that was kept for the backward pass."""
    attend = strategy.attend(visibility, target)

    def run(varied):
        return call(attend, {**arguments, **varied}, attend.prepare(placed(arguments)))

    varied = {name: arguments[name] for name in DIFFERENTIABLE if arguments[name] is not None}
    out, pull_back = jax.vjp(run, varied)
    return {"out": out, **pull_back(d_out)[0]}, jax.tree.leaves(pull_back)


@functools.cache
def differentiated(strategy: Strategy, visibility: Visibility, target: Target | None = None):
    """Jitted `(arguments, d_out) ->` the first of what `differentiate` returns."""
    return jax.jit(lambda arguments, d_out: differentiate(strategy, visibility, arguments, d_out, target)[0])
