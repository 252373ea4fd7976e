"""The attention layers of a model, from its settings and the platform."""

import dataclasses
import math

from research.attention import attend as attend_lib
from research.attention.attend import Attend, Effective, Sizes, Target
from research.attention.indexer.scores import Scoring
from research.attention.visibility import KINDS, CompressedSparse, Visibility
from research.settings.config import Settings


@dataclasses.dataclass(frozen=True)
class Spec:
    """The specification from which models and measurements are built. Created by `make`.

    Attributes:
      settings: all settings.
      target: the platform to compile for. It resolves 'auto', and whether kernels are interpreted.
    """

    settings: Settings
    target: Target

    @classmethod
    def make(
        cls, settings: Settings, platform: str | None = None, *, checks_memory: bool = True, chip: str = ""
    ) -> "Spec":
        """Checks the kinds of layers and the backend.

        Args:
          settings: all settings.
          platform: 'cpu', 'gpu' or 'tpu'; None is the platform of this process.
          checks_memory: see `Target`.
          chip: see `Target`; of this process where `platform` is None.

        Raises:
          SettingError: there is no such kind of layer, or no such backend.
        """
        model = settings.model
        if not model.layers or not set(model.layers) <= set(KINDS):
            raise model.error("layers", f"a non-empty tuple with members among {', '.join(KINDS)}")
        if not set(model.prefix) <= set(KINDS):
            raise model.error("prefix", f"a tuple with members among {', '.join(KINDS)}")
        if platform is None:
            platform, chip = attend_lib.platform(), attend_lib.chip()
        target = Target(platform, checks_memory, chip)
        attend_lib.resolve_backend(settings.attention.backend, target.platform)
        return cls(settings, target)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds of attention of the layers."""
        return self.settings.model.kinds

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return attend_lib.resolve_backend(self.settings.attention.backend, self.target.platform)

    def visibility(self, kind: str) -> Visibility:
        """The visibility of layers of a kind, in the sparse stage."""
        return KINDS[kind].make(self.settings.attention)

    def attend(self, kind: str) -> Attend:
        """The attention op of layers of a kind, in the stage of the settings."""
        visibility, settings = self.visibility(kind), self.settings.attention
        schedule_setting = "csa_schedule" if visibility.selects else "schedule"
        if visibility.selects and not self.selects:
            visibility = visibility.unselected()
        return Attend(self.backend, visibility, settings.kernel, self.target, schedule_setting)

    def effective(self, *, packed: bool = True) -> dict[str, Effective]:
        """The settings in effect, for each kind of layer.

        Args:
          packed: as in `Documents`.

        Raises:
          SettingError: a setting is malformed or has no effect.
          NotImplementedError: the backend does not support the request.
        """
        found = {}
        for kind in self.kinds:
            found[kind] = self.attend(kind).effective(self.sizes(packed=packed))
            if self.visibility(kind).selects and (self.selects or self.trains_indexer):
                found[kind] |= {f"index_{name}": value for name, value in dataclasses.asdict(self.scoring).items()}
        return found

    @property
    def heads_at_once(self) -> int:
        """Number of heads of one call of the op."""
        return self.settings.attention.heads_at_once or self.settings.attention.heads

    def sizes(self, *, packed: bool = True) -> Sizes:
        """The sizes of a layer's call of the op."""
        attention = self.settings.attention
        return Sizes(
            self.settings.data.seq_len, self.heads_at_once, attention.head_width, self.settings.model.dtype, packed
        )

    @property
    def alignment(self) -> int:
        """Documents start at multiples of this: a multiple of all strides in use, or 1 without `data.align_starts`."""
        strides = (self.visibility(kind).stride for kind in self.kinds)
        return math.lcm(*strides) if self.settings.data.align_starts else 1

    @property
    def selection(self) -> CompressedSparse:
        """The visibility by which the indexer of CSA layers selects, in every stage."""
        return CompressedSparse.make(self.settings.attention)

    @property
    def scoring(self) -> Scoring:
        """How CSA's indexer computes its scores."""
        return Scoring.make(self.settings.attention, self.target.platform)

    @property
    def selects(self) -> bool:
        """Whether CSA layers only attend to the selected entries."""
        return self.settings.attention.csa_stage == "sparse"

    @property
    def trains_indexer(self) -> bool:
        """Whether the indexer is trained by its loss. If not, weight decay does not apply to it either."""
        return self.settings.attention.csa_stage != "dense" and self.settings.attention.indexer_loss_weight > 0

    @property
    def trains_model(self) -> bool:
        """Whether the parameters other than the indexer's are trained by the language model's loss."""
        return self.settings.attention.csa_stage != "warmup"
