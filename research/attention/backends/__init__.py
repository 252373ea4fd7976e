"""The backend contract, and the table of backends.

A backend is a module with three functions:

    resolve(visibility, seq_len, heads, head_width, dtype, options, packed, target) -> Effective
    prepare(visibility, seq_len, segments, options) -> prepared
    attend(q, local, compressed, *, visibility, sinks, segments, selected, options, prepared, target) -> out

`resolve` is plain Python: it runs when a config is validated, before anything is compiled, raises on what the
backend cannot honour, and returns the settings that `attend` will use. Nothing falls back by itself. `prepare` makes
what all layers of one visibility can share within a step; a model calls it once and hands it to each of them.

What the program is compiled for is an argument, a `Target`, and nothing else decides it: a hidden variable would not
be part of what `jax.jit` caches programs by, and could hand a CPU the program of a TPU.
"""

import dataclasses
import importlib
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from research.attention import visibility as visibility_lib

_MODULES = {
    "dot_product": "research.attention.backends.dot_product",
    "blockwise": "research.attention.backends.blockwise",
    "splash": "research.attention.backends.splash.attend",
}
NAMES = tuple(_MODULES)
# Names (`jax.ad_checkpoint.checkpoint_name`) of what a backend keeps for its backward pass, so that a layer that is
# recomputed can keep them too: the output, and the log-sum-exp of the logits.
SAVED = ("attention_out", "attention_logsumexp")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may ask of a backend; the default of each field leaves the choice to the backend.

    Attributes:
      schedule: list of key blocks the kernel visits, by name (`research/attention/backends/splash/schedules`; CSA
        under blockwise: stream or gather).
      block_q: queries per block of the forward kernel.
      block_kv: keys per block of the forward kernel.
      block_kv_compute: keys per matrix product inside a forward block.
      block_q_dkv: as `block_q`, backward kernel.
      block_kv_dkv: as `block_kv`, backward kernel.
      block_kv_dkv_compute: as `block_kv_compute`, backward kernel.
      dq_reduction_steps: key blocks between reductions of dq; 0 is the schedule's own way, 3 the ring buffer.
      heads_per_call: query heads that a call of the kernel serves, a divisor of H; 0 is all.
      vmem_limit_kib: vector memory that a kernel may take on a TPU.
    """

    schedule: str = "auto"
    block_q: int = 0
    block_kv: int = 0
    block_kv_compute: int = 0
    block_q_dkv: int = 0
    block_kv_dkv: int = 0
    block_kv_dkv_compute: int = 0
    dq_reduction_steps: int = 0
    heads_per_call: int = 0
    vmem_limit_kib: int = 0


DEFAULT = Options()


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is compiled for; `target` makes one.

    Attributes:
      platform: 'cpu', 'gpu' or 'tpu'.
      checks_memory: whether a list of blocks that does not fit a TPU core's scalar memory is refused before compiling;
        False leaves it to the compiler, whose answer is wanted.
    """

    platform: str
    checks_memory: bool = True


Effective = dict[str, int | str | bool]


class Backend(Protocol):
    """The contract every backend module keeps."""

    def resolve(
        self,
        visibility: visibility_lib.Visibility,
        seq_len: int,
        heads: int,
        head_width: int,
        dtype: Any,
        options: Options,
        packed: bool = True,
        target: Target | None = None,
    ) -> Effective:
        """Returns the effective settings, with segments if `packed`; `precision` is that of products of matrices.

        `heads` are those that one `attend` serves. `target` None is this process's own devices.

        Raises:
          ValueError: an option is malformed or has no effect here; names the option, its value, what is allowed.
          NotImplementedError: the backend lacks something the request needs.
        """

    def prepare(
        self,
        visibility: visibility_lib.Visibility,
        seq_len: int,
        segments: jax.Array | None,
        options: Options,
    ) -> jax.Array | None:
        """Returns what attends of the same arguments can share, None where there is nothing."""

    def attend(
        self,
        q: jax.Array,
        local: jax.Array,
        compressed: jax.Array,
        *,
        visibility: visibility_lib.Visibility,
        sinks: jax.Array | None = None,
        segments: jax.Array | None = None,
        selected: jax.Array | None = None,
        options: Options = DEFAULT,
        prepared: jax.Array | None = None,
        target: Target | None = None,
    ) -> jax.Array:
        """Shared-key-value multi-query attention with one softmax over local keys, entries and sink.

        Logits are `q . k / sqrt(D)`, float32; keys serve as values. A row that sees nothing outputs exactly 0.

        Args:
          q: [B, S, H, D] queries.
          local: [B, S, D] raw keys.
          compressed: [B, C, D] entries, `C == visibility.num_entries(S)`.
          visibility: who sees whom.
          sinks: float32 [H], one extra logit per head that adds to the softmax's denominator alone. -inf is no sink,
            its gradient 0; NaN and +inf give NaN.
          segments: int32 [B, S], >= 0 for a document, -1 for padding; None means one document.
          selected: bool [B, S, C], required by and only by `CompressedSparse`: the indexer's choice. Of more than
            `top_k` entries that a query sees and has selected, the first `top_k` by index are attended.
          options: see `Options`.
          prepared: `prepare`'s result for the same visibility, segments and options; None: made here, if needed.
          target: what the program is compiled for; None is this process's own devices.

        Returns:
          [B, S, H, D] in q's dtype.
        """


def names() -> tuple[str, ...]:
    """Names that `config.attention.backend` may take."""
    return ("auto", *NAMES)


def platform() -> str:
    """That of this process's own devices: 'cpu', 'gpu' or 'tpu'."""
    return jax.default_backend()


def target(platform_name: str | None = None, *, checks_memory: bool = True) -> Target:
    """The target of that platform; None is this process's own."""
    return Target(platform_name or platform(), checks_memory)


def resolve_name(name: str, platform_name: str | None = None) -> str:
    """Turns 'auto' into the backend for the platform, None being this process's own; other names must be known."""
    if name == "auto":
        return "splash" if (platform_name or platform()) == "tpu" else "blockwise"
    if name not in _MODULES:
        raise ValueError(f"backend={name!r}: must be one of {', '.join(names())}")
    return name


def get(name: str) -> Backend:
    """The backend module of that name; imported late, since tokamax takes a second to import."""
    if name not in _MODULES:
        raise ValueError(f"backend={name!r}: must be one of {', '.join(NAMES)}")
    return importlib.import_module(_MODULES[name])


def check_arguments(q, local, compressed, *, visibility, sinks, segments, selected) -> None:
    """Raises ValueError, naming the argument, where shapes or dtypes break the contract."""
    if q.ndim != 4:
        raise ValueError(f"q: shape {q.shape}, must be [B, S, H, D]")
    batch, seq_len, heads, width = q.shape
    entries = visibility.num_entries(seq_len)
    _expect("local", local, (batch, seq_len, width), q.dtype)
    _expect("compressed", compressed, (batch, entries, width), q.dtype)
    if sinks is not None:
        _expect("sinks", sinks, (heads,), jnp.float32)
    if segments is not None:
        _expect("segments", segments, (batch, seq_len), jnp.int32)
    if visibility.selects:
        if selected is None:
            raise ValueError("selected: None, but CompressedSparse needs the indexer's choice, bool [B, S, C]")
        _expect("selected", selected, (batch, seq_len, entries), jnp.bool_)
    elif selected is not None:
        raise ValueError(f"selected: given, but {type(visibility).__name__} takes none")


def saved(out: jax.Array, logsumexp: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gives both their names among `SAVED`."""
    return tuple(checkpoint_name(x, name) for x, name in zip((out, logsumexp), SAVED, strict=True))


def divisors(count: int) -> str:
    """All divisors, for a message that says what is allowed."""
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


def refuse_options(backend: str, options: Options, allowed: tuple[str, ...] = ()) -> None:
    """Raises ValueError for an option that was set although this backend does not read it."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in allowed and value != field.default:
            raise ValueError(f"{field.name}={value!r}: has no effect with backend={backend!r}; leave {field.default!r}")


def _expect(name: str, array: jax.Array, shape: tuple[int, ...], dtype: Any) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name}: {array.dtype} {list(array.shape)}, must be {jnp.dtype(dtype).name} {list(shape)}")
