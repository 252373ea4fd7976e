"""Checks of a whole config that need more than its settings: in milliseconds, without compiling anything."""

import jax

from research import data
from research.attention.spec import Spec
from research.errors import ConfigError
from research.model import feed_forward
from research.settings.config import Settings


def validate(settings: Settings, platform: str | None = None, *, checks_memory: bool = True) -> Spec:
    """Checks how settings fit together, with the backends and the data, beyond what `Settings` itself checks.

    Args:
      settings: of everything.
      platform: 'cpu', 'gpu' or 'tpu', what it is to run on; None is this process's own.
      checks_memory: as in `attend.Target`.

    Returns:
      What the model is made of.

    Raises:
      ConfigError: a setting is impossible, or has no effect together with the others.
      NotImplementedError: the chosen backend cannot serve the request.
    """
    check_precision()
    spec = Spec.make(settings, platform, checks_memory=checks_memory)
    data.check(settings, spec.alignment)
    feed_forward.effective(spec)
    if any(layer.get("interpreted") for layer in spec.effective().values()):
        for group, name in ((settings.model, "remat"), (settings.attention, "heads_at_once")):
            if not group.is_default(name):
                raise NotImplementedError(
                    f"config.{group.group}.{name}={getattr(group, name)}: the interpreted splash kernel cannot be "
                    f"recomputed; use {group.default(name)} here, or another backend"
                )
    return spec


def notes(spec: Spec) -> list[str]:
    """Settings that are allowed, but have no effect with sequences of this length or beside the others; a line each."""
    attention, seq_len, found = spec.settings.attention, spec.settings.data.seq_len, []

    def note(name: str, words: str) -> None:
        found.append(f"config.attention.{name}={getattr(attention, name)}: {words}")

    if attention.window >= seq_len:
        note("window", f"no effect on sequences of {seq_len} tokens, in which every token sees all before it")
    for kind in spec.kinds:
        visibility = spec.visibility(kind)
        entries = visibility.num_entries(seq_len)
        if visibility.compresses and not entries:
            note(f"{kind}_ratio", f"sequences of {seq_len} tokens have no entry, so {kind} layers are sliding ones")
        elif visibility.selects and spec.selects and entries <= attention.top_k:
            note("top_k", f"no effect on sequences of {seq_len} tokens, which have {entries} entries")
    if "csa" in spec.kinds and spec.selects and not spec.trains_indexer:
        note("indexer_loss_weight", "the indexer selects and is not trained")
    return found


def check_precision() -> None:
    """Refuses JAX's 64-bit mode, under which the same config would make other numbers, with other rounding.

    Asked of JAX itself: it is as well set by `jax.config` as by the environment.

    Raises:
      ConfigError: the mode is on.
    """
    if jax.config.jax_enable_x64:
        raise ConfigError(
            "JAX_ENABLE_X64=1: must be 0, also as jax_enable_x64 of jax.config: other numbers would come of one config"
        )
