"""Turns documents into packed batches of bytes, with grain.

The tokens of a document are `BOS` and then its bytes. It is cut into chunks of at most `chunk_len` targets; the inputs
of a chunk are its targets shifted by one token, so a later chunk starts from the byte before it and only a document's
first from `BOS`. Every byte is a target exactly once per epoch. Each chunk is a segment of its own.

A batch is a dict of int32 arrays [B, S]:

* `inputs`, `targets`: tokens; 0 at padding, which only `segments` tells from a zero byte;
* `segments`: 0, 1, ... along a row, -1 at padding;
* `positions`: counted from 0 in each segment, 0 at padding.
"""

import dataclasses
import functools
from collections.abc import Sequence

import grain
import numpy as np

from research.data import corpus
from research.errors import SettingError

NO_TARGET = -1
BOS = 256
VOCAB_SIZE = 257
Batch = dict[str, np.ndarray]

# Rows are packed this many batches at a time: enough to fill them well, and little to pack again after a resume.
_BATCHES_PER_BUFFER = 16


@dataclasses.dataclass(frozen=True)
class PackingSpec:
    """How documents become batches; see `settings.model.Data`.

    Attributes:
      seq_len: tokens per row, S.
      batch_size: rows per batch, B.
      chunk_len: most tokens of one chunk; 0 is `seq_len`.
      alignment: chunks start on multiples of it in a row. A multiple of all compression ratios in use makes a packed
        row equal its chunks run alone; 1 wastes no padding.
    """

    seq_len: int
    batch_size: int
    chunk_len: int = 0
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.longest_chunk < self.seq_len and self.longest_chunk % self.alignment:
            raise SettingError(
                "data.chunk_len",
                self.chunk_len,
                f"a multiple of {self.alignment}, or 0 for seq_len, or else aligned starts would put padding behind "
                "every chunk: config.data.align_starts=False leaves them where they fall",
            )

    @property
    def longest_chunk(self) -> int:
        """`chunk_len` with its 0 resolved."""
        return self.chunk_len or self.seq_len


class Chunks:
    """Random access to the chunks of documents, cut when asked for: `chunks[i]` is inputs and targets, int32 [L]."""

    def __init__(self, documents: Sequence[corpus.Document], longest: int) -> None:
        self._texts = [document.text for document in documents]
        self._longest = longest
        starts = [np.arange(0, len(text), longest) for text in self._texts]
        self._start = np.concatenate(starts)
        self._text = np.repeat(np.arange(len(starts)), [len(s) for s in starts])

    def __len__(self) -> int:
        return len(self._start)

    def document(self, index: int) -> int:
        """Which document a chunk is from."""
        return int(self._text[index])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        text, start = self._texts[self._text[index]], self._start[index]
        targets = text[start : start + self._longest].astype(np.int32)
        before = text[start - 1] if start else BOS
        return {"inputs": np.concatenate([[before], targets[:-1]], dtype=np.int32), "targets": targets}


def batches(
    documents: Sequence[corpus.Document], spec: PackingSpec, seed: int, *, repeat: bool
) -> grain.IterDataset[Batch]:
    """Shuffled chunks in packed batches; the module's docstring describes them.

    With `repeat` it goes on for ever in a new order every epoch, and a row may mix the end of one epoch with the
    start of the next; without, a last batch that is not full is filled up with rows of padding. The iterators have
    `get_state()`, a dict fit for JSON, and `set_state()`, after which the same batches follow.
    """
    # grain adds the epoch to the seed, so neighbouring seeds would walk through the same orders one epoch apart.
    seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    chunks = grain.MapDataset.source(Chunks(documents, spec.longest_chunk)).shuffle(seed)
    if repeat:
        chunks = chunks.repeat()
    features = ("inputs", "targets")
    # Cutting a chunk takes microseconds: reader threads would cost more than they save.
    rows = grain.experimental.FirstFitPackIterDataset(
        chunks.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct=dict.fromkeys(features, spec.seq_len),
        num_packing_bins=_BATCHES_PER_BUFFER * spec.batch_size,
        pack_alignment_struct=dict.fromkeys(features, spec.alignment),
        seed=seed,
    )
    fill_up = functools.partial(grain.experimental.batch_and_pad, batch_size=spec.batch_size)
    return rows.batch(spec.batch_size, batch_fn=fill_up).map(_to_batch)


def _to_batch(packed: Batch) -> Batch:
    """Renames grain's features. Its segments count from 1, and 0 is padding; inputs and targets share them."""
    return {
        "inputs": packed["inputs"],
        "targets": packed["targets"],
        "segments": packed["inputs_segment_ids"] - 1,
        "positions": packed["inputs_positions"],
    }
