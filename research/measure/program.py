"""What is measured, whatever measures it: a part of a model, and the settings that matter to it."""

import dataclasses
import hashlib
import importlib.metadata
import json
from typing import Any

from research.settings import fields
from research.settings.config import Settings, from_json


@dataclasses.dataclass(frozen=True)
class Program:
    """One thing to measure. Programs that would come to the same are equal.

    Attributes:
      measure: by what, a name in `pipeline.MEASURES`.
      what: which part of a model, or which way of computing it; in the measure's words.
      settings: those that matter to it; all others have their defaults.
    """

    measure: str
    what: str
    settings: Settings

    def key(self, versions: dict[str, str]) -> str:
        """Names the program and the versions of what computes it."""
        text = json.dumps(self._content() | {"versions": versions}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """As text; `from_json` reads it."""
        return json.dumps(self._content())

    @classmethod
    def from_json(cls, text: str) -> "Program":
        """The inverse of `to_json`."""
        content = json.loads(text)
        return cls(content["measure"], content["what"], from_json(content["settings"]))

    def identify(self) -> dict[str, Any]:
        """What every row says of an attention, also when nothing came of it."""
        settings = self.settings
        attention, selects = settings.attention, settings.model.layers == ("csa",)
        return {
            "what": self.what,
            "visibility": "+".join(settings.model.layers),
            "backend": attention.backend,
            "schedule": attention.csa_schedule if selects else attention.schedule,
            "batch": settings.data.batch_size,
            "seq_len": settings.data.seq_len,
            "heads": attention.heads,
            "head_width": attention.head_width,
            "dtype": settings.model.dtype,
            "requested": attention.requested(),
        }

    def _content(self) -> dict[str, Any]:
        return {"measure": self.measure, "what": self.what, "settings": fields.as_json(self.settings)}


def keep(settings: Settings, *groups: str, **changes: dict[str, Any]) -> Settings:
    """The defaults but for whole groups of `settings` and, of others, `group={field: value}`; and the sizes of rows."""
    data = {"seq_len": settings.data.seq_len, "batch_size": settings.data.batch_size}
    kept = {name: dataclasses.asdict(getattr(settings, name)) for name in groups}
    return Settings().replace(data=data, **{**kept, **changes})


def attention_alone(settings: Settings, kind: str) -> Settings:
    """Of the attention of a kind of layers, all of its heads at once, without a layer around it."""
    alone = settings.for_kind(kind).replace(attention={"heads_at_once": 0})
    return keep(alone, "attention", model={"layers": (kind,), "dtype": settings.model.dtype})


def versions(*packages: str) -> dict[str, str]:
    """Of installed packages.

    Raises:
      ModuleNotFoundError: one is not installed.
    """
    return {name: importlib.metadata.version(name) for name in packages}
