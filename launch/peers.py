"""Our attention layer beside Hugging Face's eager one: `make peers`, or `python launch/peers.py --lengths=1024,4096`.

Needs requirements-parity.txt. Forward and backward of the whole layer (projections, compressor, indexer, attention),
batch 1, 8 heads of 64, float32, two threads. Prints a JSON row a point, and a table.
"""

import json
import sys

import rich.box
import rich.console
import rich.table
from absl import app, flags

from research import errors
from research.attention.visibility import KINDS
from research.validation import check_precision
from research.errors import ConfigError
from research.measure import peers

_LENGTHS = flags.DEFINE_list("lengths", ["1024", "4096", "8192"], "sequence lengths")
_KINDS = flags.DEFINE_list("kinds", list(KINDS), "kinds of attention")
flags.register_validator(
    "lengths", lambda texts: all(text.isdecimal() and int(text) > 0 for text in texts), "must be positive integers"
)
flags.register_validator("kinds", lambda names: set(names) <= set(KINDS), f"must be among {', '.join(KINDS)}")


def main(argv: list[str]) -> None:
    """Measures every kind at every length."""
    del argv
    try:
        check_precision()
    except ConfigError as error:
        sys.exit(f"{errors.INVALID}: {error}")
    columns = ("kind", "tokens", "ours s", "peer s", "ratio", "ours peak MiB", "peer peak MiB")
    table = rich.table.Table(*columns, box=rich.box.SIMPLE_HEAD)
    for kind in _KINDS.value:
        for seq_len in map(int, _LENGTHS.value):
            row = peers.row(kind, seq_len)
            print(json.dumps(row), flush=True)
            numbers = (f"{row['ours_seconds']:.4f}", f"{row['peer_seconds']:.3f}", f"{row['ratio']:.1f}")
            peaks = (f"{row[f'{side}_peak_bytes'] / 2**20:,.0f}" for side in ("ours", "peer"))
            table.add_row(kind, f"{seq_len:,}", *numbers, *peaks)
    rich.console.Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    app.run(main)
