"""Frozen settings of the attention layer; field names and defaults are those of `research.config`."""

import dataclasses

from research.attention import backends
from research.attention import visibility as visibility_lib
from research.attention.indexer import scores as index_scores

KINDS = ("sliding", "hca", "csa")
# How CSA is trained, one after the other (DeepSeek-V3.2, section 2.1.1): attention to all entries; the same with the
# indexer alone in training; attention to the selected entries, everything in training.
STAGES = ("dense", "warmup", "sparse")
# How RoPE's angles are made: exact at every position, or float32 products, as published weights were trained with.
ANGLES = ("exact", "reference")


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding; see `config.rope`."""

    theta: float
    compressed_theta: float
    yarn_factor: float
    yarn_original_length: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    angles: str = "exact"


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One set of attention settings for all layers of a model; see `config.attention`. `backend` is resolved.

    Beside them `target`, what the model is compiled for, by default this process's own devices.
    """

    backend: str
    schedule: str
    csa_schedule: str
    block_q: int
    block_kv: int
    block_kv_compute: int
    block_q_dkv: int
    block_kv_dkv: int
    block_kv_dkv_compute: int
    dq_reduction_steps: int
    heads_per_call: int
    vmem_limit_kib: int
    heads_at_once: int
    window: int
    hca_ratio: int
    csa_ratio: int
    top_k: int
    heads: int
    head_width: int
    rope_width: int
    q_rank: int
    out_groups: int
    out_rank: int
    index_heads: int
    index_head_width: int
    index_backend: str
    index_heads_at_once: int
    index_entries_at_once: int
    sinks: bool
    csa_stage: str
    indexer_loss_weight: float
    target: backends.Target = dataclasses.field(default_factory=backends.target)

    def visibility(self, kind: str) -> visibility_lib.Visibility:
        """The visibility of a layer of that kind ('sliding', 'hca' or 'csa')."""
        if kind == "sliding":
            return visibility_lib.SlidingWindow(self.window)
        if kind == "hca":
            return visibility_lib.HeavilyCompressed(self.window, self.hca_ratio)
        if kind == "csa":
            if self.selects:
                return self.selection
            return visibility_lib.HeavilyCompressed(self.window, self.csa_ratio)
        raise ValueError(f"attention kind {kind!r}: must be one of {', '.join(KINDS)}")

    @property
    def selection(self) -> visibility_lib.CompressedSparse:
        """What the indexer of a CSA layer selects, in stages that attend only to it and in those that do not."""
        return visibility_lib.CompressedSparse(self.window, self.csa_ratio, self.top_k)

    @property
    def scoring(self) -> index_scores.Scoring:
        """How CSA's indexer computes its scores here; ValueError where a setting is out of range."""
        return index_scores.resolve(
            self.index_backend,
            self.index_heads_at_once,
            self.index_entries_at_once,
            self.index_heads,
            self.target.platform,
        )

    @property
    def heads_of_attend(self) -> int:
        """Heads that one call of the backend's `attend` serves."""
        return self.heads_at_once or self.heads

    @property
    def selects(self) -> bool:
        """Whether CSA attends to the selected entries only."""
        return self.csa_stage == "sparse"

    @property
    def trains_indexer(self) -> bool:
        """Whether the indexer learns, from its own loss; what has none is not to be touched by weight decay either."""
        return self.csa_stage != "dense" and self.indexer_loss_weight > 0

    @property
    def trains_model(self) -> bool:
        """Whether all else learns, from the language model's loss."""
        return self.csa_stage != "warmup"

    def options(self, kind: str) -> backends.Options:
        """The backend options of a layer of that kind: CSA has a schedule of its own."""
        names = [field.name for field in dataclasses.fields(backends.Options)]
        options = {name: getattr(self, name) for name in names}
        if kind == "csa":
            options["schedule"] = self.csa_schedule
        return backends.Options(**options)
