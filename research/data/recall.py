"""Rows that ask for something said before, at a distance that is known: what tells kinds of attention apart.

`recall` is multi-query associative recall (Arora et al., 2023, arXiv:2312.04927): pairs of a key and its value lie amid
blanks, and each key comes once more, where the model is to answer with its value. `needle` hides one pair in noise, and
asks for it at the row's end. The distance of an answer is that from its value to its question, in tokens: a window of W
sees the value where it is below W. Distances are drawn evenly from 4 on, so that most are long: where short ones are
frequent, a model learns to answer with what is near, and then no more for a long time (LOG.md).

A batch is a dict of int32 arrays [B, S] as in `research.data.packing`, a row one document without padding, and

* `targets`: the value at a question, `NO_TARGET` elsewhere;
* `distances`: that of the answer at a question, 0 elsewhere.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from typing import ClassVar

import grain
import numpy as np

from research.data.packing import NO_TARGET, Batch
from research.errors import SettingError

_KEYS = range(0, 16)
_VALUES = range(16, 32)
CHANCE = 1 / len(_VALUES)  # of a guess
_BLANK = 32
_NOISE = range(32, 256)
_NEAREST = 4  # distance
_MOST_FILLED = 0.5  # of a row: then the distance that was drawn nearly always fits
_ROWS = 2**31  # before training would see the first one again
_TRAINING, _VALIDATION = 0, 1  # streams of random numbers; that of validation is the same for every run's seed


@dataclasses.dataclass(frozen=True)
class Recall:
    """A task whose rows are made when asked for; the counterpart of `research.data.Data`.

    Attributes:
      task: 'recall' or 'needle'.
      seq_len: tokens per row, S.
      batch_size: rows per batch, B.
      pairs: pairs per row; 0 for a needle.
      seed: of the training rows.
    """

    task: str
    seq_len: int
    batch_size: int
    pairs: int
    seed: int
    predicts_bytes: ClassVar[bool] = False  # but one of a few values

    def __post_init__(self) -> None:
        if not ranges(self.seq_len):
            raise SettingError("data.seq_len", self.seq_len, f"{_NEAREST + 3} or more for a {self.task}")
        most = min(len(_KEYS), int(self.seq_len * _MOST_FILLED) // 3)
        if self.task == "needle" and self.pairs:
            raise SettingError("data.pairs", self.pairs, "0 with data.task=needle, which is alone")
        if self.task == "recall" and not 1 <= self.pairs <= most:
            raise SettingError("data.pairs", self.pairs, f"from 1 to {most} with data.task=recall")

    @property
    def digest(self) -> str:
        """SHA-256 of the first validation rows."""
        rows = _Rows(self, (_VALIDATION,))
        return hashlib.sha256(b"".join(rows[i][name].tobytes() for i in range(8) for name in rows[i])).hexdigest()

    @property
    def epoch_tokens(self) -> int:
        """0: rows are made for ever, no two alike."""
        return 0

    def train_iterator(self) -> grain.DatasetIterator[Batch]:
        """An endless iterator with `get_state()` and `set_state()`."""
        return iter(self._batches((_TRAINING, self.seed)))

    def validation_batches(self, limit: int = 0) -> Iterator[Batch]:
        """The first `limit` validation batches, the same for every seed; without a limit they never end."""
        return itertools.islice(self._batches((_VALIDATION,)), limit or None)

    def documents(self, batch: Batch, *, validation: bool = False) -> list[str]:
        """What a batch was made from, told as `research.data.Data` tells it."""
        del batch
        return [f"{self.task} for validation" if validation else f"{self.task} of seed {self.seed}"]

    def describe(self) -> dict[str, str | int]:
        """What the rows are, for the run's record."""
        return {"source": self.task, "pairs": self.pairs, "digest": self.digest}

    def _batches(self, stream: tuple[int, ...]) -> grain.IterDataset[Batch]:
        rows = grain.MapDataset.source(_Rows(self, stream)).batch(self.batch_size, drop_remainder=True)
        return rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def ranges(seq_len: int) -> list[tuple[int, int]]:
    """First and last distance of each range that fits into a row: (4, 7), (8, 15), ..."""
    edges = [_NEAREST]
    while edges[-1] <= _furthest(seq_len):
        edges.append(2 * edges[-1])
    return [(first, min(after - 1, _furthest(seq_len))) for first, after in itertools.pairwise(edges)]


def _furthest(seq_len: int) -> int:
    """The distance where key and value come first in the row, and the question last."""
    return seq_len - 3


class _Rows:
    """Random access to rows, each drawn from a generator of its own."""

    def __init__(self, task: Recall, stream: tuple[int, ...]) -> None:
        self._task, self._stream = task, stream

    def __len__(self) -> int:
        return _ROWS

    def __getitem__(self, index: int) -> Batch:
        rng, seq_len = np.random.default_rng((*self._stream, index)), self._task.seq_len
        needle = self._task.task == "needle"
        inputs = rng.choice(_NOISE, seq_len) if needle else np.full(seq_len, _BLANK)
        targets, distances = np.full(seq_len, NO_TARGET), np.zeros(seq_len, int)
        free = np.ones(seq_len, bool)
        pairs = self._task.pairs or 1
        keys, values = rng.choice(_KEYS, pairs, replace=False), rng.choice(_VALUES, pairs)
        for key, value in zip(keys, values, strict=True):
            start, distance = _place(rng, free, at_end=needle)
            question = start + 1 + distance
            inputs[[start, start + 1, question]] = key, value, key
            targets[question], distances[question] = value, distance
            free[[start, start + 1, question]] = False
        row = {"inputs": inputs, "targets": targets, "segments": np.zeros(seq_len), "positions": np.arange(seq_len)}
        return {name: array.astype(np.int32) for name, array in (row | {"distances": distances}).items()}


def _place(rng: np.random.Generator, free: np.ndarray, at_end: bool) -> tuple[int, int]:
    """Where a pair starts, and the distance from its value to its question, all on free places."""
    while True:
        distance = int(rng.integers(_NEAREST, _furthest(len(free)) + 1))
        if at_end:
            return len(free) - 2 - distance, distance
        question = free[1 + distance :]
        starts = np.flatnonzero(free[: len(question)] & free[1 : len(question) + 1] & question)
        if len(starts):
            return int(rng.choice(starts)), distance
