"""Checks of a whole config that need more than its settings: in milliseconds, without compiling anything."""

import jax

from research import data
from research.attention.spec import Spec
from research.errors import ConfigError
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
    if any(layer.get("interpreted") for layer in spec.effective().values()):
        for group, name in ((settings.model, "remat"), (settings.attention, "heads_at_once")):
            if not group.is_default(name):
                raise NotImplementedError(
                    f"config.{group.group}.{name}={getattr(group, name)}: the interpreted splash kernel cannot be "
                    f"recomputed; use {group.default(name)} here, or another backend"
                )
    return spec


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
