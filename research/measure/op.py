"""A single attention: random arguments of the op, and how many of its FLOPs are of use."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from research.attention.attend import Attend, Documents, Keys, Sizes
from research.attention.indexer import selection
from research.attention.spec import Spec

# Of the size of one forward product q.k: forward has 2 (q.k, weights.v), backward 5 more (q.k again, and d_weights,
# d_q, d_k, d_v).
PRODUCTS = {"forward": 2, "backward": 5, "forward_backward": 7}
Arguments = dict[str, Float[Array, "..."]]  # q, local, compressed and sinks, by which one differentiates


@dataclasses.dataclass(frozen=True)
class Op:
    """The attention of a layer, on rows of one document each."""

    attend: Attend
    sizes: Sizes
    batch: int

    @classmethod
    def make(cls, spec: Spec, kind: str) -> "Op":
        """That of layers of a kind, all heads at once."""
        settings = spec.settings
        sizes = spec.sizes(packed=False)._replace(heads=settings.attention.heads)
        return cls(spec.attend(kind), sizes, settings.data.batch_size)

    def arguments(self) -> tuple[Arguments, Bool[Array, "B S C"] | None]:
        """Random arguments, and where the visibility selects, a random selection."""
        seq_len, heads, width, dtype, _ = self.sizes
        visibility, keys = self.attend.visibility, jax.random.split(jax.random.key(0), 4)
        shapes = {
            "q": (self.batch, seq_len, heads, width),
            "local": (self.batch, seq_len, width),
            "compressed": (self.batch, visibility.num_entries(seq_len), width),
        }
        drawn = {
            name: jax.random.normal(key, shape, dtype) for key, (name, shape) in zip(keys, shapes.items(), strict=False)
        }
        selected = None
        if visibility.selects:
            visible = selection.visible_entries(visibility, Documents.whole(self.batch, seq_len).segments)
            selected = selection.membership(jax.random.uniform(keys[3], visible.shape), visible, visibility.top_k)
        return drawn | {"sinks": jnp.zeros(heads)}, selected

    def __call__(self, arguments: Arguments, selected: Bool[Array, "B S C"] | None) -> Float[Array, "B S H D"]:
        """Attends."""
        keys = Keys(arguments["local"], arguments["compressed"])
        documents = Documents.whole(self.batch, self.sizes.seq_len)
        return self.attend(arguments["q"], keys, documents, sinks=arguments["sinks"], selected=selected)

    def useful_flops(self, phase: str) -> int:
        """FLOPs of the products over visible pairs alone; `phase` as in `PRODUCTS`."""
        pairs = self.batch * self.sizes.heads * self.attend.visibility.pairs(self.sizes.seq_len)
        return PRODUCTS[phase] * 2 * pairs * self.sizes.head_width
