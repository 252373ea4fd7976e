"""Real text, or a recall task, as batches: `build(settings, alignment)` is all that a training loop needs."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

import grain

from research.data import corpus, packing
from research.data.packing import BOS, VOCAB_SIZE, Batch, PackingSpec
from research.data.recall import Recall
from research.settings.config import Settings
from research.settings.model import TEXT

__all__ = [
    "BOS",
    "VOCAB_SIZE",
    "Batch",
    "Data",
    "PackingSpec",
    "Recall",
    "build",
    "check",
    "packing_spec",
    "task",
]

# Not the run's seed: runs that differ in it are compared on the same validation batches.
_VALIDATION_SEED = 0


@dataclasses.dataclass(frozen=True)
class Data:
    """A corpus and how to pack it; batches are described in `research.data.packing`."""

    corpus: corpus.Corpus
    packing: PackingSpec
    seed: int
    predicts_bytes: ClassVar[bool] = True  # each real token's target is a byte: losses are bits per byte, too

    @property
    def digest(self) -> str:
        """SHA-256 of the corpus, whatever the fraction held out and the packing."""
        return self.corpus.digest

    @property
    def epoch_tokens(self) -> int:
        """Tokens of the training documents."""
        return sum(len(document.text) for document in self.corpus.training)

    def train_iterator(self) -> grain.DatasetIterator[Batch]:
        """An endless iterator with `get_state()` and `set_state()`, reshuffled every epoch by the seed."""
        return iter(packing.batches(self.corpus.training, self.packing, self.seed, repeat=True))

    def validation_batches(self, limit: int = 0) -> Iterator[Batch]:
        """The first `limit` validation batches (0: all of them), a fixed sample that is the same for every seed."""
        dataset = packing.batches(self.corpus.validation, self.packing, _VALIDATION_SEED, repeat=False)
        return itertools.islice(dataset, limit or None)

    def documents(self, batch: Batch, *, validation: bool = False) -> list[str]:
        """Names of the training documents, or of those for `validation`, that a batch's pieces were cut from.

        Where pieces are alike, all of them.
        """
        side, pieces = self.corpus.validation if validation else self.corpus.training, set()
        for targets, segments in zip(batch["targets"], batch["segments"], strict=True):
            pieces |= {targets[segments == segment].tobytes() for segment in range(segments.max() + 1)}
        chunks = packing.Chunks(side, self.packing.longest_chunk)
        found = {chunks.document(i) for i in range(len(chunks)) if chunks[i]["targets"].tobytes() in pieces}
        return sorted(side[index].name for index in found)

    def describe(self) -> dict[str, str | int]:
        """What was read, for the run's record: source, documents and bytes of each side, duplicates, digest."""
        training, validation = self.corpus.training, self.corpus.validation
        return {
            "source": self.corpus.description,
            "training_documents": len(training),
            "training_bytes": sum(len(document.text) for document in training),
            "validation_documents": len(validation),
            "validation_bytes": sum(len(document.text) for document in validation),
            "duplicate_documents": self.corpus.duplicates,
            "binary_files_left_out": self.corpus.binary_files,
            "digest": self.digest,
        }


def packing_spec(settings: Settings, alignment: int) -> PackingSpec:
    """The packing that `settings.data` asks for.

    Args:
      settings: of everything.
      alignment: on which multiples chunks start; a multiple of every compression ratio in use, or 1.

    Raises:
      SettingError: the longest chunk does not fit the alignment.
    """
    return PackingSpec(settings.data.seq_len, settings.data.batch_size, settings.data.chunk_len, alignment)


def task(settings: Settings) -> Recall:
    """The task that `settings.data` asks for, unless that is text.

    Raises:
      SettingError: its rows do not fit.
    """
    data = settings.data
    return Recall(data.task, data.seq_len, data.batch_size, data.pairs, settings.seed)


def check(settings: Settings, alignment: int) -> None:
    """Raises SettingError where rows cannot be made; arguments as `packing_spec`. Reads nothing."""
    if settings.model.vocab_size < VOCAB_SIZE:
        raise settings.model.error("vocab_size", f"at least {VOCAB_SIZE}, the token ids of the data")
    if settings.data.task == TEXT:
        packing_spec(settings, alignment)
    else:
        task(settings)


def build(settings: Settings, alignment: int) -> Data | Recall:
    """Reads the corpus of `settings.data`, or makes its task.

    Arguments and errors are those of `packing_spec` and `corpus.load`, or `task`.
    """
    if settings.data.task != TEXT:
        return task(settings)
    spec = packing_spec(settings, alignment)
    return Data(corpus.load(settings.data.path, settings.data.validation_fraction), spec, settings.seed)
