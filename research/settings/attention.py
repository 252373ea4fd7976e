"""Settings of the attention layers, those of all kinds together; `research.attention.spec` makes layers of them."""

import dataclasses
from collections.abc import Iterator

from research.hardware import LANES
from research.settings.group import NOT_NEGATIVE, POSITIVE, UNSET_OR_MORE, Allowed, Group, one_of, setting

# How CSA is trained, one after the other (DeepSeek-V3.2, section 2.1.1): attention to all entries; the same with the
# indexer alone in training; attention to the selected entries, everything in training.
STAGES = ("dense", "warmup", "sparse")
COMPRESSED = ("csa", "hca")  # the kinds of layers with compressed entries
_CHOSEN = "0: chosen for you"


@dataclasses.dataclass(frozen=True)
class Kernel(Group, group="attention"):
    """How a backend computes attention, not what: each backend reads some of these, and refuses the others."""

    schedule: str = setting("auto", "sliding and HCA layers: which key blocks are visited; by backend and kind")
    csa_schedule: str = setting(
        "auto", "CSA layers: hybrid or dynamic (splash), stream or gather (blockwise, joined)", only="csa"
    )
    block_q: int = setting(0, f"queries per block of the forward pass; {_CHOSEN}")
    block_kv: int = setting(0, f"keys per block of the forward pass; {_CHOSEN}")
    block_kv_compute: int = setting(0, f"splash: keys per matrix product inside a forward block; {_CHOSEN}")
    block_q_dkv: int = setting(0, "splash: as block_q, backward pass; 0: as forward")
    block_kv_dkv: int = setting(0, "splash: as block_kv, backward pass; 0: as forward")
    block_kv_dkv_compute: int = setting(0, "splash: as block_kv_compute, backward pass; 0: as forward")
    dq_reduction_steps: int = setting(
        0,
        "splash: key blocks between reductions of dq; 0: the schedule's own way, 3: a ring buffer",
        Allowed(lambda steps: steps in (0, 3), "0 (the schedule's own) or 3"),
    )
    flash_kernel: str = setting(
        "auto",
        "joined: what computes its two parts; auto: by the chip, xla where there is no GPU",
        one_of("auto", "mosaic", "triton", "xla"),
    )
    heads_per_call: int = setting(0, "splash: heads that a call of the kernel serves; 0: all")
    vmem_limit_kib: int = setting(0, f"splash on a TPU: vector memory that a kernel may take; {_CHOSEN}", UNSET_OR_MORE)


@dataclasses.dataclass(frozen=True)
class Attention(Kernel, group="attention"):
    """One set of settings for all attention layers of a model."""

    backend: str = setting("auto", "what computes attention; auto: splash on a TPU, joined on a GPU, else blockwise")
    heads_at_once: int = setting(0, "heads that a layer computes at a time, recomputing them backward; 0: all")
    window: int = setting(128, "local keys that a query sees, its own included", POSITIVE)
    hca_ratio: int = setting(128, "tokens per entry of HCA layers", POSITIVE, kinds=("hca",))
    csa_ratio: int = setting(4, "tokens per entry of CSA layers", POSITIVE, kinds=("csa",))
    top_k: int = setting(64, "entries that a CSA query sees", POSITIVE, kinds=("csa",))
    heads: int = setting(4, "query heads", POSITIVE)
    head_width: int = setting(64, "channels of a head", POSITIVE)
    rope_width: int = setting(16, "trailing channels of a head that carry the position", POSITIVE)
    q_rank: int = setting(64, "width of the low-rank query", POSITIVE)
    out_groups: int = setting(2, "groups of heads of the low-rank output projection", POSITIVE)
    out_rank: int = setting(32, "width per group of the low-rank output projection", POSITIVE)
    index_heads: int = setting(4, "heads of CSA's indexer", POSITIVE, kinds=("csa",))
    index_head_width: int = setting(32, "channels of an index head", POSITIVE, kinds=("csa",))
    index_backend: str = setting(
        "auto",
        "what computes the indexer's scores; auto: pallas on a TPU, else xla",
        one_of("auto", "xla", "pallas"),
        "csa",
    )
    index_heads_at_once: int = setting(0, f"index heads that scores are computed of at a time; {_CHOSEN}", only="csa")
    index_entries_at_once: int = setting(
        0,
        f"entries that scores are computed of at a time; {_CHOSEN}",
        Allowed(lambda size: size >= 0 and size % LANES == 0, f"0 (chosen for you) or a multiple of {LANES}"),
        "csa",
    )
    sinks: bool = setting(True, "one learned sink per head")
    csa_stage: str = setting(
        "sparse", "what CSA attends to and trains: all entries, the indexer alone, the selected", one_of(*STAGES), "csa"
    )
    indexer_loss_weight: float = setting(
        1.0, "of the mean over CSA layers of the indexer's loss; 0 leaves it out", NOT_NEGATIVE, kinds=("csa",)
    )

    @property
    def kernel(self) -> Kernel:
        """What is asked of a backend."""
        return Kernel(**{name: getattr(self, name) for name in Kernel.__dataclass_fields__})

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """See `Group`."""
        for name in ("head_width", "index_head_width"):
            if self.rope_width > getattr(self, name):
                yield "rope_width", f"at most {name}={getattr(self, name)}"
        if self.rope_width % 2:
            yield "rope_width", "even, since channels are rotated in pairs"
        if self.heads % self.out_groups:
            yield "out_groups", f"a divisor of heads={self.heads}"
        at_once, least = self.heads_at_once, self.heads // self.out_groups
        if at_once and (at_once < 0 or self.heads % at_once or at_once % least):
            yield "heads_at_once", f"0 (all), or divide {self.heads} by a multiple of {least}"
        at_once = self.index_heads_at_once
        if at_once < 0 or (at_once and self.index_heads % at_once):
            yield "index_heads_at_once", f"0 (chosen for you) or a divisor of {self.index_heads}"
        if self.csa_stage == "dense":
            for name in ("index_backend", "index_heads_at_once", "index_entries_at_once"):
                if not self.is_default(name):
                    yield name, f"left at {self.default(name)!r} with csa_stage=dense, which asks no indexer"
            if not self.is_default("indexer_loss_weight"):
                default = self.default("indexer_loss_weight")
                yield "indexer_loss_weight", f"{default} with csa_stage=dense, which has no such loss"
        if self.csa_stage == "warmup" and not self.indexer_loss_weight:
            yield "indexer_loss_weight", "positive with csa_stage=warmup, which trains nothing else"

    def requested(self) -> dict[str, int | str]:
        """What was asked of the backends, to be recorded beside what takes effect."""
        names = ["backend", *Kernel.__dataclass_fields__]
        names += ["index_backend", "index_heads_at_once", "index_entries_at_once"]
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Rope(Group, group="rope"):
    """Rotary position embedding."""

    theta: float = setting(10_000.0, "of sliding layers", POSITIVE)
    compressed_theta: float = setting(160_000.0, "of CSA and HCA layers", POSITIVE, kinds=COMPRESSED)
    yarn_factor: float = setting(
        1.0,
        "of CSA and HCA layers; 1 is no YaRN",
        Allowed(lambda factor: factor >= 1, "at least 1 (no YaRN)"),
        kinds=COMPRESSED,
    )
    yarn_original_length: int = setting(65_536, "tokens that YaRN extends", POSITIVE)
    yarn_beta_fast: float = setting(32.0, "turns over the original length above which a channel is kept", POSITIVE)
    yarn_beta_slow: float = setting(1.0, "turns below which a channel is slowed by the whole factor", POSITIVE)
    angles: str = setting(
        "exact",
        "at any position; reference: float32 products, for parity with published weights",
        one_of("exact", "reference"),
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """See `Group`."""
        for name in ("yarn_original_length", "yarn_beta_fast", "yarn_beta_slow"):
            if self.yarn_factor == 1 and not self.is_default(name):
                yield name, f"left at {self.default(name)!r} with yarn_factor=1, which is no YaRN"
        if self.yarn_beta_slow >= self.yarn_beta_fast:
            yield "yarn_beta_slow", f"below yarn_beta_fast={self.yarn_beta_fast}"
