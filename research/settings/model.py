"""Settings of the model around its attention layers, and of the text it reads."""

import dataclasses
from collections.abc import Iterator

from research.settings.group import NOT_NEGATIVE, POSITIVE, UNSET_OR_MORE, Allowed, Group, one_of, setting

TEXT = "text"
TASKS = ("recall", "needle")


@dataclasses.dataclass(frozen=True)
class Model(Group, group="model"):
    """A decoder language model."""

    prefix: tuple[str, ...] = setting((), "attention kind of each layer before the stack, none repeated")
    layers: tuple[str, ...] = setting(("sliding", "csa", "hca"), "attention kind of each layer of one repeat")
    repeats: int = setting(1, "how often `layers` is stacked; compile time does not depend on it", POSITIVE)
    hidden: int = setting(128, "width of the hidden states", POSITIVE)
    vocab_size: int = setting(257, "token ids, at least those of the data; of bytes there are 257", POSITIVE)
    ffn_width: int = setting(344, "SwiGLU's inner width, of each expert if there are some", POSITIVE)
    swiglu_limit: float = setting(
        0.0, "SwiGLU's gate is at most this, its other factor within it both ways; 0: no limit", NOT_NEGATIVE
    )
    streams: int = setting(
        1, "copies of the residual stream, mixed by hyper-connections; 1: a plain residual", POSITIVE
    )
    sinkhorn_rounds: int = setting(20, "in which the streams' mixing matrix is balanced", POSITIVE)
    streams_eps: float = setting(1e-6, "of the streams' gates and of their balancing", POSITIVE)
    tied_head: bool = setting(True, "output projection shares the embedding's matrix")
    norm_eps: float = setting(1e-6, "of all RMS norms", POSITIVE)
    dtype: str = setting(
        "float32", "what matrices are multiplied in; parameters are float32", one_of("float32", "bfloat16")
    )
    remat: str = setting(
        "none", "what is recomputed in the backward pass: nothing, or each block", one_of("none", "block")
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """See `Group`."""
        if self.streams == 1:
            for name in ("sinkhorn_rounds", "streams_eps"):
                if not self.is_default(name):
                    yield name, f"left at {self.default(name)!r} with model.streams=1"

    @property
    def all_layers(self) -> tuple[str, ...]:
        """The kind of every layer, from the first to the last."""
        return self.prefix + self.layers * self.repeats

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds of layers."""
        return tuple(dict.fromkeys(self.prefix + self.layers))


@dataclasses.dataclass(frozen=True)
class Experts(Group, group="experts"):
    """Feed-forward layers of which each token uses a few: a mixture of experts, each of width `model.ffn_width`."""

    count: int = setting(0, "routed experts of a layer; 0: one feed-forward layer for all tokens", NOT_NEGATIVE)
    per_token: int = setting(2, "experts that a token is given to", POSITIVE)
    shared: int = setting(
        1, "experts that serve every token beside them: none or one", Allowed(lambda n: n in (0, 1), "0 or 1")
    )
    hash_layers: int = setting(0, "of the first layers: a table gives each token id its experts", NOT_NEGATIVE)
    scale: float = setting(1.5, "what the weights of a token's experts sum to", POSITIVE)
    backend: str = setting(
        "auto", "how they are computed; auto: by platform", one_of("auto", "dense", "blocks", "ragged")
    )
    block_rows: int = setting(0, "rows of a block of tokens of one expert, under blocks", UNSET_OR_MORE)
    balance_rate: float = setting(1e-3, "by which an update moves the balance of experts", NOT_NEGATIVE)
    balance_weight: float = setting(1e-4, "of the loss that keeps each document's experts even", NOT_NEGATIVE)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """See `Group`."""
        if not self.count:
            for field in dataclasses.fields(self):
                if not self.is_default(field.name):
                    yield field.name, f"left at {field.default!r} with experts.count=0"
        elif self.per_token > self.count:
            yield "per_token", f"from 1 to experts.count={self.count}"
        if self.block_rows and self.backend in ("dense", "ragged"):
            yield "block_rows", f"left at 0 with experts.backend={self.backend}"


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
