"""Settings of the model around its attention layers, and of the text it reads."""

import dataclasses
from collections.abc import Iterator

from research.settings.group import NOT_NEGATIVE, POSITIVE, Allowed, Group, one_of, setting

TEXT = "text"
TASKS = ("recall", "needle")


@dataclasses.dataclass(frozen=True)
class Model(Group, group="model"):
    """A decoder language model."""

    layers: tuple[str, ...] = setting(("sliding", "csa", "hca"), "attention kind of each layer of one repeat")
    repeats: int = setting(1, "how often `layers` is stacked; compile time does not depend on it", POSITIVE)
    hidden: int = setting(128, "width of the hidden states", POSITIVE)
    ffn_width: int = setting(344, "SwiGLU's inner width", POSITIVE)
    tied_head: bool = setting(True, "output projection shares the embedding's matrix")
    norm_eps: float = setting(1e-6, "of all RMS norms", POSITIVE)
    dtype: str = setting(
        "float32", "what matrices are multiplied in; parameters are float32", one_of("float32", "bfloat16")
    )
    remat: str = setting(
        "none", "what is recomputed in the backward pass: nothing, or each block", one_of("none", "block")
    )


@dataclasses.dataclass(frozen=True)
class Data(Group, group="data"):
    """Rows of tokens: text as bytes, or a task of recall."""

    task: str = setting(
        TEXT, "text; recall: pairs of key and value, asked for later; needle: one pair", one_of(TEXT, *TASKS)
    )
    pairs: int = setting(0, "of key and value in a row of recall")
    path: str = setting("stdlib", "the standard library's sources, or a file, folder or glob (.gz too)")
    seq_len: int = setting(512, "tokens of a row", POSITIVE)
    batch_size: int = setting(4, "rows of a batch", POSITIVE)
    chunk_len: int = setting(0, "longest piece of a document; 0: seq_len", NOT_NEGATIVE)
    align_starts: bool = setting(True, "documents start where an entry of every ratio in use starts")
    validation_fraction: float = setting(
        0.05,
        "of the documents, held out by what they say",
        Allowed(lambda share: 0 < share < 1, "between 0 and 1, both excluded"),
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """See `Group`."""
        text = self.task == TEXT
        for name in ("pairs",) if text else ("path", "chunk_len", "align_starts", "validation_fraction"):
            if not self.is_default(name):
                yield name, f"left at {self.default(name)!r} with data.task={self.task}"
        if self.chunk_len > self.seq_len:
            yield "chunk_len", f"from 1 to seq_len={self.seq_len}, or 0 for seq_len"
