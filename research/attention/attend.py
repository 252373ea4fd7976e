"""The attention op: `attend = spec.attend(kind)`, then `attend(q, keys, documents)`.

A backend is a module `research.attention.backends.NAME` with the functions of `Backend`. `Attend` checks the arguments
and resolves the settings, once for all backends. A request that a backend does not support raises; no backend replaces
another.

The platform that a program is compiled for is an attribute of the op (`Target`), not global state. Global state is not
part of the key of `jax.jit`'s cache, so a program compiled for a TPU could be reused on a CPU.

This file is not split: the op and the contract of its backends are the two sides of one call.
"""

import dataclasses
import importlib
from typing import Any, NamedTuple, Protocol, no_type_check

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from research import hardware
from research.attention.backends import NAMES
from research.attention.visibility import Visibility
from research.errors import SettingError
from research.settings.attention import Kernel

# Names (`jax.ad_checkpoint.checkpoint_name`) of a backend's residuals: the output, and the log-sum-exp of the logits.
# A rematerialised layer saves them too.
SAVED = ("attention_out", "attention_logsumexp")

Effective = dict[str, int | str | bool]
Prepared = Any  # the result of a backend's `prepare`


@dataclasses.dataclass(frozen=True)
class Target:
    """The platform that a program is compiled for.

    Attributes:
      platform: 'cpu', 'gpu' or 'tpu'.
      checks_memory: whether a list of blocks that exceeds a TPU core's scalar memory is refused before compiling. False
        leaves the check to the compiler.
      chip: its name in `research.hardware`, empty if unknown.
    """

    platform: str
    checks_memory: bool = True
    chip: str = ""


class Keys(NamedTuple):
    """The keys of all heads, which are also the values."""

    local: Float[Array, "B S D"]  # a key per token
    compressed: Float[Array, "B C D"]  # entries, `C == visibility.num_entries(S)`


@no_type_check  # of its construction: JAX rebuilds pytrees with leaves that are not arrays, such as None or shardings
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a batch of sequences.

    Attributes:
      positions: of the tokens, for RoPE alone. Visibility uses the index of a token in its sequence.
      segments: ids of the documents, >= 0, whose tokens are consecutive; `visibility.PADDING` for padding.
      packed: False if it is known at compile time that each sequence is one document without padding.
    """

    positions: Int32[Array, "B S"]
    segments: Int32[Array, "B S"]
    packed: bool = dataclasses.field(default=True, metadata={"static": True})

    @classmethod
    def whole(cls, batch: int, seq_len: int) -> "Documents":
        """Sequences of one document each, without padding."""
        positions = jnp.broadcast_to(jnp.arange(seq_len, dtype=jnp.int32), (batch, seq_len))
        return cls(positions, jnp.zeros((batch, seq_len), jnp.int32), packed=False)


class Inputs(NamedTuple):
    """The checked arguments of a call of `Attend`."""

    q: Float[Array, "B S H D"]
    keys: Keys
    documents: Documents
    sinks: Float32[Array, " H"] | None
    selected: Bool[Array, "B S C"] | None
    prepared: Prepared


class Pass(NamedTuple):
    """The cost of a forward or backward pass over one head of one sequence, by closed formula.

    Attributes:
      pairs: pairs of a query and a key that are computed, visible or not.
      moved_bytes: bytes moved between the device's memory and its cores.
    """

    pairs: int
    moved_bytes: float


class Backend(Protocol):
    """The functions of a backend module."""

    def resolve(self, attend: "Attend", sizes: "Sizes") -> Effective:
        """Returns the settings in effect, in plain Python; `precision` is the precision of matrix products.

        Raises:
          SettingError: a setting is malformed or has no effect.
          NotImplementedError: the backend does not support the request.
        """

    def prepare(self, attend: "Attend", documents: Documents) -> Prepared:
        """Returns what all calls for the same documents share, None if nothing."""

    def compute(self, attend: "Attend", effective: Effective, inputs: Inputs) -> Float[Array, "B S H D"]:
        """Returns the output of `Attend.__call__`."""

    def cost(self, attend: "Attend", sizes: "Sizes", effective: Effective) -> tuple[Pass, Pass]:
        """Returns the costs of the forward and of the backward pass."""


class Sizes(NamedTuple):
    """The sizes of a call on which its settings in effect and its cost depend; `packed` as in `Documents`."""

    seq_len: int
    heads: int
    head_width: int
    dtype: Any
    packed: bool = True


@dataclasses.dataclass(frozen=True)
class Attend:
    """Multi-query attention with shared keys and values, and one softmax over local keys, entries and sink.

    Attributes:
      backend: one of `backends.NAMES`.
      visibility: which keys each query sees.
      options: the backend's settings.
      target: the platform to compile for.
      schedule_setting: the name of the option that holds the schedule; CSA layers have a separate one.
    """

    backend: str
    visibility: Visibility
    options: Kernel
    target: Target
    schedule_setting: str = "schedule"

    @property
    def schedule(self) -> str:
        """The requested schedule."""
        return getattr(self.options, self.schedule_setting)

    def effective(self, sizes: Sizes) -> Effective:
        """The settings in effect, including the backend's name.

        Raises:
          SettingError: a setting is malformed or has no effect.
          NotImplementedError: the backend does not support the request.
        """
        return {"backend": self.backend, **_module(self.backend).resolve(self, sizes)}

    def prepare(self, documents: Documents) -> Prepared:
        """What all calls for the same documents share within a step, None if nothing."""
        return _module(self.backend).prepare(self, documents)

    def cost(self, sizes: Sizes) -> tuple[Pass, Pass]:
        """The costs of the forward and of the backward pass over one head of one sequence, by closed formula."""
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
        """Attends. Logits are `q . k / sqrt(D)` in float32. The output of a query that sees no key is exactly 0.

        Args:
          q: queries.
          keys: local keys and entries, in q's dtype.
          documents: the documents of the tokens.
          sinks: a logit per head that is added to the softmax's denominator only. -inf is no sink and has gradient 0;
            NaN and +inf give NaN.
          selected: the entries that the indexer selected for each query. Required if the visibility selects, otherwise
            not allowed. If more than `top_k` entries are visible and selected, the first `top_k` by index are attended.
          prepared: the result of `prepare` for the same documents; None computes it in this call, if needed.

        Returns:
          The output in q's dtype.

        Raises:
          ValueError: an argument has a wrong shape or dtype. The message names the argument.
          SettingError, NotImplementedError: as `effective`.
        """
        inputs = Inputs(q, keys, documents, sinks, selected, prepared)
        _check(self.visibility, inputs)
        effective = self.effective(Sizes(*q.shape[1:], q.dtype, documents.packed))
        return _module(self.backend).compute(self, effective, inputs)

    def error(self, name: str, allowed: str) -> SettingError:
        """The error for an option whose value is not allowed; `allowed` as in `SettingError`."""
        return self.options.error(self.schedule_setting if name == "schedule" else name, allowed)

    def refuse_unread(self, *read: str) -> None:
        """Raises SettingError if an option other than these, which the backend reads, is not at its default."""
        for name in self.options.__dataclass_fields__:
            if name in ("schedule", "csa_schedule"):
                unread = name == self.schedule_setting and "schedule" not in read
            else:
                unread = name not in read
            if unread and not self.options.is_default(name):
                words = f"left at {self.options.default(name)!r}: it has no effect with backend={self.backend!r} here"
                raise self.options.error(name, words)


def platform() -> str:
    """The platform of this process's devices: 'cpu', 'gpu' or 'tpu'."""
    return jax.default_backend()


def chip() -> str:
    """The chip of this process's devices, a name in `research.hardware`; empty if unknown."""
    found = hardware.find_chip(jax.devices()[0].device_kind)
    return found.name if found else ""


def resolve_backend(name: str, on_platform: str) -> str:
    """The backend for a value of `config.attention.backend`; 'auto' is the default backend of the platform.

    Raises:
      SettingError: there is no such backend.
    """
    if name == "auto":
        return {"tpu": "splash", "gpu": "joined"}.get(on_platform, "blockwise")
    if name not in NAMES:
        raise SettingError("attention.backend", name, f"one of auto, {', '.join(NAMES)}")
    return name


def saved(
    out: Float[Array, "..."], logsumexp: Float32[Array, "..."]
) -> tuple[Float[Array, "..."], Float32[Array, "..."]]:
    """Tags both residuals with their names in `SAVED`."""
    return tuple(checkpoint_name(x, name) for x, name in zip((out, logsumexp), SAVED, strict=True))


def _module(name: str) -> Backend:
    """The backend's module, imported on first use: importing tokamax takes a second."""
    return importlib.import_module(f"research.attention.backends.{name}")


def _check(visibility: Visibility, inputs: Inputs) -> None:
    """Raises ValueError, naming the argument, if a shape or dtype is not as in `Attend.__call__`."""
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


def _expect(name: str, array: Shaped[Array, "..."], shape: tuple[int, ...], dtype: Any) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name}: {array.dtype} {list(array.shape)}, must be {jnp.dtype(dtype).name} {list(shape)}")
