"""Feed-forward layers: SwiGLU for all tokens, or a mixture of experts."""

from typing import Any, NamedTuple

import haiku as hk
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from research.attention.layer.linear import project, weight
from research.attention.spec import Spec
from research.metrics import Mean
from research.model import experts as experts_lib
from research.model.experts import Matrices
from research.model.router import Router, balance_loss, loads
from research.model.swiglu import swiglu
from research.settings.model import Model

EXPERTS = "experts"


def feed_forward(x: Float[Array, "*rows E"], settings: Model, name: str) -> Float[Array, "*rows E"]:
    """SwiGLU of all tokens, by parameters of the calling module: `name`_gate, `name`_up and `name`_down."""
    width, limit = settings.ffn_width, settings.swiglu_limit
    gated = swiglu(project(f"{name}_gate", x, width), project(f"{name}_up", x, width), limit)
    return project(f"{name}_down", gated, settings.hidden)


def is_routed(module: str, name: str) -> bool:
    """Whether a parameter is that of routed experts, of which a token sees a few."""
    return module.rpartition("/")[2] == EXPERTS and name in Matrices._fields


def effective(spec: Spec, devices: int = 1) -> dict[str, dict[str, Any]]:
    """How experts are really computed, under their name; empty without experts.

    Args:
      spec: the model's spec.
      devices: that share the rows of a batch.

    Raises:
      SettingError: a setting has no effect.
    """
    settings = spec.settings
    if not settings.experts.count:
        return {}
    rows = settings.data.batch_size // (settings.train.accumulate * devices)
    tokens = rows * settings.data.seq_len
    return {EXPERTS: experts_lib.resolve(settings.experts, tokens, spec.target.platform)._asdict()}


class Mixed(NamedTuple):
    """What a mixture of experts makes: its output, how many tokens each expert has, and its `balance_loss`, if any."""

    out: Float[Array, "B S E"]
    loads: Int32[Array, " X"]
    balance: Mean | None


class MixtureOfExperts(hk.Module):
    """Routed experts, of which each token has a few, and one that all share; float32 parameters."""

    def __init__(self, spec: Spec, *, by_table: bool, name: str = EXPERTS) -> None:
        """Initializes the module.

        Args:
          spec: the model's spec.
          by_table: whether a token's experts depend on its id alone.
          name: the module's name.
        """
        super().__init__(name=name)
        self.spec, self.by_table = spec, by_table

    def __call__(self, x: Float[Array, "B S E"], tokens: Int32[Array, "B S"], segments: Int32[Array, "B S"]) -> Mixed:
        """Applies the experts.

        Args:
          x: normalised hidden states.
          tokens: their ids.
          segments: documents' ids, -1 for padding, which has no experts but the shared one.
        """
        model, settings = self.spec.settings.model, self.spec.settings.experts
        flat, real = x.reshape(-1, x.shape[-1]), (segments >= 0).reshape(-1)
        routing, scores = Router(settings, model.vocab_size, by_table=self.by_table)(flat, tokens.reshape(-1), real)
        experts, hidden, width = settings.count, model.hidden, model.ffn_width
        matrices = Matrices(
            weight("gate", (experts, hidden, width)),
            weight("up", (experts, hidden, width)),
            weight("down", (experts, width, hidden)),
        )
        compute = experts_lib.resolve(settings, len(flat), self.spec.target.platform)
        out = compute(flat, routing, matrices, model.swiglu_limit).reshape(x.shape)
        if settings.shared:
            out += feed_forward(x, model, "shared").astype(jnp.float32)
        balance = None
        if not self.by_table:
            by_row = (array.reshape(*segments.shape, -1) for array in (scores, routing.ids))
            balance = balance_loss(*by_row, segments)
        return Mixed(out.astype(x.dtype), loads(routing.ids, experts), balance)
