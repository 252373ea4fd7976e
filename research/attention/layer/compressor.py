"""Compressed entries: a learned, channel-wise softmax pooling of every completed window of tokens."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from research.attention import visibility as visibility_lib
from research.attention.attend import Documents
from research.attention.layer import rope
from research.attention.layer.linear import project
from research.attention.layer.norms import RMSNorm
from research.attention.visibility import HeavilyCompressed


class Compressor(hk.Module):
    """Pools `ratio` tokens into one entry, normalises it, and rotates it by the position of its first token.

    HCA pools each window alone (DeepSeek-V4, equations 20 to 23). CSA overlaps: every token has two series of
    values and gates, and entry w pools the first series of window w - 1 with the second of window w (equations 9
    to 12); window w - 1 is left out where it does not exist or lies in another document.

    Attributes:
      visibility: of the layer: how many tokens an entry pools, and whether windows overlap.
      width: channels of an entry.
      norm_eps: of the entry's RMS norm.
      freqs: from `rope.frequencies`.
    """

    def __init__(
        self,
        visibility: HeavilyCompressed,
        width: int,
        norm_eps: float,
        freqs: np.ndarray,
        name: str = "compressor",
    ) -> None:
        super().__init__(name=name)
        self.visibility, self.width, self.norm_eps, self.freqs = visibility, width, norm_eps, freqs

    def __call__(self, x: Float[Array, "B S E"], documents: Documents) -> Float[Array, "B C D"]:
        """Compresses a sequence; an unfinished last window yields no entry.

        Args:
          x: hidden states.
          documents: of the tokens. Entries of windows that straddle documents are finite and meant to be hidden.

        Returns:
          `C = S // ratio` entries of `width` channels in x's dtype.
        """
        ratio, overlap = self.visibility.ratio, self.visibility.overlaps
        entries = x.shape[1] // ratio
        whole = slice(entries * ratio)
        channels = (2 if overlap else 1) * self.width
        windows = (len(x), entries, ratio, channels)
        values = project("values", x[:, whole], channels).reshape(windows)
        gates = project("gates", x[:, whole], channels, jnp.float32).reshape(windows)
        gates += hk.get_parameter("position_bias", windows[2:], jnp.float32, jnp.zeros)[None, None]
        present = None
        if overlap:
            values, gates = _beside_previous(values), _beside_previous(gates)
            present = _previous_is_same_document(documents.segments, ratio)
            present = jnp.stack([present, jnp.ones_like(present)], axis=-1).repeat(ratio, axis=-1)[..., None]
        normed = RMSNorm(self.norm_eps, name="norm")(pool(values, gates, present))
        return rope.rotate(normed, documents.positions[:, whole][:, ::ratio], self.freqs).astype(x.dtype)


def pool(
    values: Float[Array, "B C R D"], gates: Float32[Array, "B C R D"], present: Bool[Array, "B C R 1"] | None = None
) -> Float32[Array, "B C D"]:
    """Averages over tokens, each channel with a softmax of its own.

    In float32 whatever the dtype of the values: in bfloat16 the weights of 128 tokens would not sum to 1.

    Args:
      values: of the R tokens of each entry.
      gates: their logits.
      present: tokens that take part, at least one of each entry; None means all.
    """
    return jnp.sum(values.astype(jnp.float32) * jax.nn.softmax(gates, axis=2, where=present), axis=2)


def _beside_previous(series: Float[Array, "B C R two_series"]) -> Float[Array, "B C pooled D"]:
    """The first series of window w - 1 (zeros for w = 0), then the second of window w."""
    first, second = jnp.split(series, 2, axis=-1)
    previous = jnp.pad(first, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    return jnp.concatenate([previous, second], axis=2)


def _previous_is_same_document(segments: Int32[Array, "B S"], ratio: int) -> Bool[Array, "B C"]:
    """Whether windows w - 1 and w lie wholly in one document."""
    segments = visibility_lib.entry_segments(segments, ratio)
    previous = jnp.pad(segments, ((0, 0), (1, 0)), constant_values=visibility_lib.STRADDLES)[:, :-1]
    return visibility_lib.same_segment(segments, previous)
