"""Compressed entries: a learned, channel-wise softmax pooling of every completed window of tokens."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from research.attention import visibility as visibility_lib
from research.attention.layer import rope
from research.attention.layer.linear import project
from research.attention.layer.norms import RMSNorm


class Compressor(hk.Module):
    """Pools `ratio` tokens into one entry, normalises it, and rotates it by the position of its first token.

    HCA pools each window alone (DeepSeek-V4, equations 20 to 23). CSA overlaps: every token has two series of
    values and gates, and entry w pools the first series of window w - 1 with the second of window w (equations 9
    to 12); window w - 1 is left out where it does not exist or lies in another document.

    Attributes:
      ratio: tokens per entry.
      width: channels of an entry.
      overlap: whether windows overlap, as in CSA.
      norm_eps: of the entry's RMS norm.
      freqs: from `rope.frequencies`.
    """

    def __init__(
        self, ratio: int, width: int, *, overlap: bool, norm_eps: float, freqs: np.ndarray, name: str = "compressor"
    ):
        super().__init__(name=name)
        self.ratio = ratio
        self.width = width
        self.overlap = overlap
        self.norm_eps = norm_eps
        self.freqs = freqs

    def __call__(self, x_BxSxE: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        """Compresses a sequence; an unfinished last window yields no entry.

        Args:
          x_BxSxE: hidden states.
          positions: int32 [B, S].
          segments: int32 [B, S]. Entries of windows that straddle documents are finite and meant to be hidden.

        Returns:
          [B, S // ratio, width] in x's dtype.
        """
        batch, seq_len, _ = x_BxSxE.shape
        entries = seq_len // self.ratio
        whole = slice(entries * self.ratio)
        channels = (2 if self.overlap else 1) * self.width
        windows = (batch, entries, self.ratio, channels)
        values = project("values", x_BxSxE[:, whole], channels).reshape(windows)
        gates = project("gates", x_BxSxE[:, whole], channels, jnp.float32).reshape(windows)
        gates += hk.get_parameter("position_bias", windows[2:], jnp.float32, jnp.zeros)[None, None]
        present = None
        if self.overlap:
            values, gates = _beside_previous(values), _beside_previous(gates)
            present = _previous_is_same_document(segments, self.ratio)
            present = jnp.stack([present, jnp.ones_like(present)], axis=-1).repeat(self.ratio, axis=-1)[..., None]
        normed = RMSNorm(self.norm_eps, name="norm")(pool(values, gates, present))
        return rope.rotate(normed, positions[:, whole][:, :: self.ratio], self.freqs).astype(x_BxSxE.dtype)


def pool(values: jax.Array, gates: jax.Array, present: jax.Array | None = None) -> jax.Array:
    """Averages over tokens, each channel with a softmax of its own.

    In float32 whatever the dtype of the values: in bfloat16 the weights of 128 tokens would not sum to 1.

    Args:
      values: [B, C, tokens, D].
      gates: float32 [B, C, tokens, D].
      present: bool [B, C, tokens, 1], tokens that take part, at least one of each entry; None means all.

    Returns:
      float32 [B, C, D].
    """
    return jnp.sum(values.astype(jnp.float32) * jax.nn.softmax(gates, axis=2, where=present), axis=2)


def _beside_previous(series_BxCxRx2D: jax.Array) -> jax.Array:
    """[B, C, 2R, D]: the first series of window w - 1 (zeros for w = 0), then the second of window w."""
    first, second = jnp.split(series_BxCxRx2D, 2, axis=-1)
    previous = jnp.pad(first, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    return jnp.concatenate([previous, second], axis=2)


def _previous_is_same_document(segments: jax.Array, ratio: int) -> jax.Array:
    """Bool [B, C]: whether windows w - 1 and w lie wholly in one document."""
    of_entry = visibility_lib.entry_segments(segments, ratio)
    of_previous = jnp.pad(of_entry, ((0, 0), (1, 0)), constant_values=visibility_lib.STRADDLES)[:, :-1]
    return visibility_lib.same_segment(of_entry, of_previous)
