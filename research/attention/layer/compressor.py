"""Compressed entries: a learned softmax pooling, per channel, of each complete window of tokens."""

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from research.attention import visibility as visibility_lib
from research.attention.attend import Documents
from research.attention.layer import rope
from research.attention.layer.linear import project
from research.attention.layer.norms import RMSNorm
from research.attention.visibility import HeavilyCompressed


class Compressor(hk.Module):
    """Pools windows of `ratio` tokens into entries, then applies RMS norm, and RoPE at the position of the first token.

    In HCA, entry w pools window w (DeepSeek-V4, equations 20 to 23). In CSA, windows overlap: each token has two series
    of values and gates, and entry w pools the first series of window w - 1 and the second series of window w (equations
    9 to 12). Window w - 1 is left out if it does not exist or belongs to another document.

    Attributes:
      visibility: of the layer; has the ratio, and whether windows overlap.
      width: channels of an entry.
      norm_eps: epsilon of the RMS norm.
      freqs: from `rope.frequencies`.
    """

    def __init__(
        self,
        visibility: HeavilyCompressed,
        width: int,
        norm_eps: float,
        freqs: rope.Frequencies,
        name: str = "compressor",
    ) -> None:
        super().__init__(name=name)
        self.visibility, self.width, self.norm_eps, self.freqs = visibility, width, norm_eps, freqs

    def __call__(self, x: Float[Array, "B S E"], documents: Documents) -> Float[Array, "B C D"]:
        """Compresses sequences. An incomplete last window has no entry.

        Args:
          x: hidden states.
          documents: the documents of the tokens. Entries of windows that straddle documents are finite, and are meant
            to be masked.

        Returns:
          `C = S // ratio` entries in x's dtype.
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
            values, gates = _with_previous(values), _with_previous(gates)
            present = _previous_is_same_document(documents.segments, ratio)
            present = jnp.stack([present, jnp.ones_like(present)], axis=-1).repeat(ratio, axis=-1)[..., None]
        normed = RMSNorm(self.norm_eps, name="norm")(pool(values, gates, present))
        return rope.rotate(normed, documents.positions[:, whole][:, ::ratio], self.freqs).astype(x.dtype)


def pool(
    values: Float[Array, "B C R D"], gates: Float32[Array, "B C R D"], present: Bool[Array, "B C R 1"] | None = None
) -> Float32[Array, "B C D"]:
    """Averages the values of the R tokens of an entry, with a softmax per channel.

    In float32 for every dtype of the values: in bfloat16 the weights of 128 tokens would not sum to 1.

    Args:
      values: values of the tokens.
      gates: logits of the softmax.
      present: the tokens to pool, at least one per entry; None is all.
    """
    return jnp.sum(values.astype(jnp.float32) * jax.nn.softmax(gates, axis=2, where=present), axis=2)


def _with_previous(series: Float[Array, "B C R channels"]) -> Float[Array, "B C 2*R channels//2"]:
    """The first series of window w - 1, zeros for w = 0, and the second series of window w."""
    first, second = jnp.split(series, 2, axis=-1)
    previous = jnp.pad(first, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    return jnp.concatenate([previous, second], axis=2)


def _previous_is_same_document(segments: Int32[Array, "B S"], ratio: int) -> Bool[Array, "B C"]:
    """Whether windows w - 1 and w are both inside the same document."""
    segments = visibility_lib.entry_segments(segments, ratio)
    previous = jnp.pad(segments, ((0, 0), (1, 0)), constant_values=visibility_lib.STRADDLES)[:, :-1]
    return visibility_lib.same_segment(segments, previous)
