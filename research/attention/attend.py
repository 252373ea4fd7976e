"""The attention op, an object: `attend = spec.attend(kind)`, then `attend(q, keys, documents)`.

A backend is a module `research.attention.backends.NAME` with the functions of `Backend`. The op checks arguments and
settles what takes effect, so that no backend does so again. Nothing falls back by itself.

What the program is compiled for is part of the op, a `Target`, and nothing else decides it: a hidden variable would not
be part of what `jax.jit` caches programs by, and could hand a CPU the program of a TPU.

One file: the op and the contract of its backends are two sides of one call.
"""

import dataclasses
import importlib
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from research.attention.backends import NAMES
from research.attention.visibility import Visibility
from research.errors import SettingError
from research.settings.attention import Kernel

# Names (`jax.ad_checkpoint.checkpoint_name`) of what a backend keeps for its backward pass, so that a layer that is
# recomputed can keep them too: the output, and the log-sum-exp of the logits.
SAVED = ("attention_out", "attention_logsumexp")

Effective = dict[str, int | str | bool]
Prepared = Any  # what a backend's `prepare` makes


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is compiled for.

    Attributes:
      platform: 'cpu', 'gpu' or 'tpu'.
      checks_memory: whether a list of blocks that does not fit a TPU core's scalar memory is refused before compiling;
        False leaves it to the compiler, whose answer is wanted.
    """

    platform: str
    checks_memory: bool = True


class Keys(NamedTuple):
    """What queries attend to; keys serve as values, and all heads share them."""

    local: Float[Array, "B S D"]  # raw keys
    compressed: Float[Array, "B C D"]  # entries, `C == visibility.num_entries(S)`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Documents:
    """Where the tokens of the rows stand.

    Attributes:
      positions: what RoPE rotates by; visibility counts tokens on the sequence's grid instead.
      segments: >= 0 for a document, `visibility.PADDING` for none.
      packed: False where every row is known, before the program runs, to be one document without padding.
    """

    positions: Int32[Array, "B S"]
    segments: Int32[Array, "B S"]
    packed: bool = dataclasses.field(default=True, metadata={"static": True})

    @classmethod
    def whole(cls, batch: int, seq_len: int) -> "Documents":
        """Rows of one document each."""
        positions = jnp.broadcast_to(jnp.arange(seq_len, dtype=jnp.int32), (batch, seq_len))
        return cls(positions, jnp.zeros((batch, seq_len), jnp.int32), packed=False)


class Inputs(NamedTuple):
    """Checked arguments of `Attend`."""

    q: Float[Array, "B S H D"]
    keys: Keys
    documents: Documents
    sinks: Float32[Array, " H"] | None
    selected: Bool[Array, "B S C"] | None
    prepared: Prepared


class Pass(NamedTuple):
    """What a pass over a head of a sequence takes, by closed formula: pairs of query and key computed, bytes moved."""

    pairs: int
    moved_bytes: float


class Backend(Protocol):
    """The contract every backend module keeps."""

    def resolve(self, attend: "Attend", sizes: "Sizes") -> Effective:
        """Returns the settings that will take effect; `precision` is that of products of matrices. Plain Python.

        Raises:
          SettingError: a setting is malformed or has no effect here.
          NotImplementedError: the backend lacks something the request needs.
        """

    def prepare(self, attend: "Attend", documents: Documents) -> Prepared:
        """Returns what attends to the same documents can share, None where there is nothing."""

    def compute(self, attend: "Attend", effective: Effective, inputs: Inputs) -> Float[Array, "B S H D"]:
        """Returns what `Attend` does."""

    def cost(self, attend: "Attend", sizes: "Sizes", effective: Effective) -> tuple[Pass, Pass]:
        """Returns the price of the forward and of the backward pass."""


class Sizes(NamedTuple):
    """What a program's cost depends on beside its settings; `packed` as in `Documents`."""

    seq_len: int
    heads: int
    head_width: int
    dtype: Any
    packed: bool = True


@dataclasses.dataclass(frozen=True)
class Attend:
    """Shared-key-value multi-query attention with one softmax over local keys, entries and sink.

    Attributes:
      backend: one of `backends.NAMES`.
      visibility: who sees whom.
      options: what is asked of the backend.
      target: what it is compiled for.
      schedule_setting: which of the options is its schedule: CSA layers have one of their own.
    """

    backend: str
    visibility: Visibility
    options: Kernel
    target: Target
    schedule_setting: str = "schedule"

    @property
    def schedule(self) -> str:
        """The schedule that is asked for."""
        return getattr(self.options, self.schedule_setting)

    def effective(self, sizes: Sizes) -> Effective:
        """The settings that will take effect, the backend's name among them.

        Raises:
          SettingError: a setting is malformed or has no effect here.
          NotImplementedError: the backend lacks something the request needs.
        """
        return {"backend": self.backend, **_module(self.backend).resolve(self, sizes)}

    def prepare(self, documents: Documents) -> Prepared:
        """What calls for the same documents can share within a step, None where there is nothing."""
        return _module(self.backend).prepare(self, documents)

    def cost(self, sizes: Sizes) -> tuple[Pass, Pass]:
        """The price of the forward and of the backward pass, a head of a sequence, by closed formula."""
        return _module(self.backend).cost(self, sizes, self.effective(sizes))

    def __call__(
        self,
        q: Float[Array, "B S H D"],
        keys: Keys,
        documents: Documents,
        *,
        sinks: Float32[Array, " H"] | None = None,
        selected: Bool[Array, "B S C"] | None = None,
        prepared: Prepared = None,
    ) -> Float[Array, "B S H D"]:
        """Attends. Logits are `q . k / sqrt(D)`, float32; a row that sees nothing outputs exactly 0.

        Args:
          q: queries.
          keys: local keys and entries, in q's dtype.
          documents: of the tokens.
          sinks: one extra logit per head that adds to the softmax's denominator alone. -inf is no sink, its gradient 0;
            NaN and +inf give NaN.
          selected: required by and only by visibilities that select: the indexer's choice. Of more than `top_k` entries
            that a query sees and has selected, the first `top_k` by index are attended.
          prepared: what `prepare` made of the same documents; None: made here, if needed.

        Returns:
          In q's dtype.

        Raises:
          ValueError: an argument's shape or dtype is not as above; names it.
          SettingError, NotImplementedError: as `effective`.
        """
        inputs = Inputs(q, keys, documents, sinks, selected, prepared)
        _check(self.visibility, inputs)
        effective = self.effective(Sizes(*q.shape[1:], q.dtype, documents.packed))
        return _module(self.backend).compute(self, effective, inputs)

    def error(self, name: str, allowed: str) -> SettingError:
        """That an option's value is not allowed; `allowed` as in `SettingError`."""
        return self.options.error(self.schedule_setting if name == "schedule" else name, allowed)

    def refuse_unread(self, *read: str) -> None:
        """Raises SettingError for an option that was set although the backend reads only these."""
        for name in self.options.__dataclass_fields__:
            if name in ("schedule", "csa_schedule"):
                unread = name == self.schedule_setting and "schedule" not in read
            else:
                unread = name not in read
            if unread and not self.options.is_default(name):
                words = f"left at {self.options.default(name)!r}: it has no effect with backend={self.backend!r} here"
                raise self.options.error(name, words)


def platform() -> str:
    """That of this process's own devices: 'cpu', 'gpu' or 'tpu'."""
    return jax.default_backend()


def backend_of(name: str, on_platform: str) -> str:
    """The backend that `config.attention.backend` names on a platform; 'auto' is the platform's own.

    Raises:
      SettingError: there is no such backend.
    """
    if name == "auto":
        return "splash" if on_platform == "tpu" else "blockwise"
    if name not in NAMES:
        raise SettingError("attention.backend", name, f"one of auto, {', '.join(NAMES)}")
    return name


def saved(out: Array, logsumexp: Array) -> tuple[Array, Array]:
    """Gives both their names among `SAVED`."""
    return tuple(checkpoint_name(x, name) for x, name in zip((out, logsumexp), SAVED, strict=True))


def _module(name: str) -> Backend:
    """The backend's module; imported late, since tokamax takes a second to import."""
    return importlib.import_module(f"research.attention.backends.{name}")


def _check(visibility: Visibility, inputs: Inputs) -> None:
    """Raises ValueError, naming the argument, where shapes or dtypes break the contract."""
    q, (local, compressed), documents, sinks, selected, _ = inputs
    if q.ndim != 4:
        raise ValueError(f"q: shape {q.shape}, must be [B, S, H, D]")
    batch, seq_len, heads, width = q.shape
    entries = visibility.num_entries(seq_len)
    _expect("keys.local", local, (batch, seq_len, width), q.dtype)
    _expect("keys.compressed", compressed, (batch, entries, width), q.dtype)
    _expect("documents.positions", documents.positions, (batch, seq_len), jnp.int32)
    _expect("documents.segments", documents.segments, (batch, seq_len), jnp.int32)
    if sinks is not None:
        _expect("sinks", sinks, (heads,), jnp.float32)
    if visibility.selects:
        if selected is None:
            raise ValueError(
                f"selected: None, but {type(visibility).__name__} needs the indexer's choice, bool [B, S, C]"
            )
        _expect("selected", selected, (batch, seq_len, entries), jnp.bool_)
    elif selected is not None:
        raise ValueError(f"selected: given, but {type(visibility).__name__} takes none")


def _expect(name: str, array: Array, shape: tuple[int, ...], dtype: Any) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name}: {array.dtype} {list(array.shape)}, must be {jnp.dtype(dtype).name} {list(shape)}")
