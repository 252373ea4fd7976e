"""What choosing CSA's entries costs, scores included: `python launch/selection.py`.

The usual one-hot way beside ours over all scores at once (`threshold`) and over blocks of queries (`streamed`, what the
layer does); batch 1, 4 index heads of 32, float32, one document. A JSON row a point, then a table.
"""

import json
import sys

import rich.box
import rich.console
import rich.table
from absl import app, flags

from research import errors
from research.validation import check_precision
from research.errors import ConfigError
from research.measure import selecting

_LENGTHS = flags.DEFINE_list("lengths", ["4096", "8192", "16384"], "sequence lengths")
flags.register_validator(
    "lengths", lambda texts: all(text.isdecimal() and int(text) > 0 for text in texts), "must be positive integers"
)
_TOP_K = flags.DEFINE_integer("top_k", 512, "entries that a query selects", lower_bound=1)
_TIMEOUT = flags.DEFINE_float("timeout_minutes", 10.0, "for one point, after which it is a row that says so")

_MIB = 2**-20


def main(argv: list[str]) -> None:
    """Measures every way at every length."""
    del argv
    try:
        check_precision()
    except ConfigError as error:
        sys.exit(f"{errors.INVALID}: {error}")
    columns = ("way", "tokens", "entries", "s", "temp MiB", "peak MiB", "status")
    table = rich.table.Table(*columns, box=rich.box.SIMPLE_HEAD)
    for seq_len in map(int, _LENGTHS.value):
        for way in selecting.WAYS:
            row = selecting.row(selecting.Point(way, seq_len, _TOP_K.value), _TIMEOUT.value * 60)
            print(json.dumps(row), flush=True)
            seconds = f"{row['seconds']:.3f}" if "seconds" in row else ""
            sizes = (f"{row[key] * _MIB:,.0f}" if key in row else "" for key in ("temp_bytes", "peak_rss_bytes"))
            table.add_row(way, f"{seq_len:,}", f"{row.get('entries', 0):,}", seconds, *sizes, row["status"])
    rich.console.Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    app.run(main)
