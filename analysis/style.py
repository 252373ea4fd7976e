"""The look of all pictures: opaque white, so that they read on light and dark pages, and told apart without colour."""

import io
import pathlib
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.figure
import matplotlib.pyplot as plt

from research.errors import ConfigError
from research.runs import files

# Okabe and Ito's colours, told apart by colour-blind readers too; and what tells lines apart in grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", "--", ":", "-.")
EMPTY = "#F2F2F2"  # of a map: where nothing is


def line(number: int) -> dict[str, str]:
    """Colour and marker of a line; no two of the first 49 share both."""
    return {"color": COLOURS[number % 7], "marker": MARKERS[(number + number // 7) % 7]}


def check_file(flag: str, path: pathlib.Path) -> None:
    """Raises ConfigError where a picture cannot be written to a file of that name."""
    formats = sorted(matplotlib.figure.Figure().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(f"{flag}={path}: must end in one of .{', .'.join(formats)}")


def save(figure: matplotlib.figure.Figure, file: pathlib.Path | io.BytesIO) -> None:
    """Writes the figure, in the format that the file's name ends in or else as a PNG, and closes it.

    A file is written whole or not at all.
    """
    kind = file.suffix[1:].lower() if isinstance(file, pathlib.Path) else "png"
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=110, facecolor="white")
    plt.close(figure)
    if isinstance(file, pathlib.Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(file, content.getvalue())
    else:
        file.write(content.getvalue())


def png(draw: Callable[..., None], *arguments: Any) -> bytes:
    """What one of the modules' `draw` writes, given these arguments and, after them, a file."""
    file = io.BytesIO()
    draw(*arguments, file)
    return file.getvalue()
