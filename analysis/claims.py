"""Claims beside what was found: a verdict for each by one rule, and one picture with a panel for each."""

import dataclasses
import io
import math
import pathlib
import textwrap
from typing import Any, NamedTuple

import matplotlib.axes
import matplotlib.colors
import matplotlib.pyplot as plt
import matplotlib.ticker

from analysis import style

CONFIRMED, PARTLY, REFUTED, NOT_MEASURABLE = "confirmed", "partly", "refuted", "not measurable here"
_BADGES: dict[str, dict[str, Any]] = {
    word: {"color": text, "fontsize": 10, "fontweight": "bold", "bbox": {"boxstyle": "round,pad=0.3", **box}}
    for word, text, box in (
        (CONFIRMED, "white", {"facecolor": "#222222"}),
        (PARTLY, "white", {"facecolor": "#767676"}),
        (REFUTED, "black", {"facecolor": "white"}),
        (NOT_MEASURABLE, "black", {"facecolor": "white", "linestyle": ":"}),
    )
}
# Whose value it is: one look in all panels.
_LOOKS = {
    "claimed": {"color": style.COLOURS[6], "marker": "*", "markersize": 10, "linestyle": ":"},
    "peer": {"color": style.COLOURS[4], "marker": "D", "linestyle": "--"},
    "static": {"color": style.COLOURS[0], "marker": "s"},
    "dynamic": {"color": style.COLOURS[1], "marker": "^"},
    "closed_form": {"color": style.COLOURS[2], "marker": "o"},
    "hybrid": {"color": style.COLOURS[2], "marker": "o"},  # CSA's default, as closed_form is that of the others
    "computed": {"color": style.COLOURS[5], "marker": "P"},
    "captured": {"color": style.COLOURS[3], "marker": "v"},
    "dense": {"color": style.COLOURS[3], "marker": "X"},
}
_COLUMNS, _WIDTH = 3, 40  # panels a row; characters of a title's line
_POINTS, _GAP = 9, 0.1  # of text; share of a panel's height that a line of text takes


class Value(NamedTuple):
    """A number of a panel, or the failure in its place.

    Attributes:
      name: of the curve or bar it belongs to.
      look: whose it is: claimed, of a peer, of a schedule by its name, or dense.
      tokens: S.
      number: in the claim's unit; NaN where it failed.
      status: of what failed.
    """

    name: str
    look: str
    tokens: int
    number: float
    status: str = "ok"


@dataclasses.dataclass(frozen=True)
class Claim:
    """What is claimed, by whom, and what was found of it.

    Attributes:
      source: who claims it.
      text: what.
      unit: of its values.
      values: claimed ones, found ones, a peer's.
      tests: for each thing that the claim says and that was measured, whether it is so.
      found: what was found, as lines of text.
      bars: whether the values are drawn as bars, not as curves over tokens.
    """

    source: str
    text: str
    unit: str
    values: list[Value]
    tests: list[bool]
    found: list[str]
    bars: bool = False

    @property
    def verdict(self) -> str:
        """Confirmed where all tests hold, refuted where none does, else partly; without tests not measurable here."""
        if not self.tests:
            return NOT_MEASURABLE
        return CONFIRMED if all(self.tests) else PARTLY if any(self.tests) else REFUTED

    @property
    def lines(self) -> list[str]:
        """The claim and its verdict, and indented below them what was found."""
        return [f"{self.source}: {self.text} -> {self.told}", *(f"    {line}" for line in self.found)]

    @property
    def told(self) -> str:
        """The verdict, and how many of the tests hold."""
        return f"{self.verdict}, {sum(self.tests)} of {len(self.tests)}" if self.tests else self.verdict


def draw(claims: list[Claim], file: pathlib.Path | io.BytesIO) -> None:
    """Writes a PNG, a panel for each claim: its verdict, its text, and its values, named where they are drawn."""
    rows = math.ceil(len(claims) / _COLUMNS)
    figure, grid = plt.subplots(rows, _COLUMNS, figsize=(13, 3.6 * rows), squeeze=False)
    inches = {"left": 1.3 / 13, "right": 1 - 0.35 / 13, "bottom": 0.5 / (3.6 * rows), "top": 1 - 0.95 / (3.6 * rows)}
    figure.subplots_adjust(**inches, wspace=0.52, hspace=0.7)
    for axes in grid.flat[len(claims) :]:
        axes.set_axis_off()
    for axes, claim in zip(grid.flat, claims, strict=False):
        axes.tick_params(labelsize=_POINTS)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        (_bars if claim.bars else _curves)(axes, claim)
        title = textwrap.wrap(f"{claim.source}: {claim.text}", _WIDTH)
        axes.set_title("\n".join(title), loc="left", fontsize=_POINTS + 1)
        above = (3, 12 + 14 * len(title))
        axes.annotate(claim.told, (0, 1), above, "axes fraction", "offset points", **_BADGES[claim.verdict])
    style.save(figure, file)


def _curves(axes: matplotlib.axes.Axes, claim: Claim) -> None:
    """A curve for each name over tokens, named at its end; failures are crosses on the lower edge, told above it."""
    curves: dict[str, list[Value]] = {}
    failures: dict[tuple[str, str], list[Value]] = {}
    for value in sorted(claim.values, key=lambda value: value.tokens):
        if value.status == "ok":
            curves.setdefault(value.name, []).append(value)
        else:
            failures.setdefault((value.name, value.status), []).append(value)
    told = [
        (line, values[0].look)
        for (name, status), values in failures.items()
        for line in textwrap.wrap(f"{name} at {', '.join(_short(v.tokens) for v in values)}: {status}", _WIDTH)
    ]
    tokens = sorted({value.tokens for value in claim.values})
    _limits(
        axes, tokens, [value.number for values in curves.values() for value in values], 1 + len(told) if told else 0
    )
    for values in curves.values():
        look = {"markersize": 5} | _LOOKS[values[0].look]
        axes.plot([value.tokens for value in values], [value.number for value in values], **look)
    _name(axes, [values[-1] for values in curves.values()], tokens[-1])
    for value in (value for values in failures.values() for value in values):
        axes.plot(value.tokens, 0.05, "x", color=_LOOKS[value.look]["color"], transform=axes.get_xaxis_transform())
    for number, (line, look) in enumerate(reversed(told), 1):
        axes.text(0.02, 0.03 + 0.8 * _GAP * number, line, transform=axes.transAxes, **_text(look))
    axes.set_xticks(tokens, [_short(n) for n in tokens])
    axes.set_xlabel("tokens", fontsize=_POINTS)
    axes.set_ylabel(claim.unit, fontsize=_POINTS)


def _limits(axes: matplotlib.axes.Axes, tokens: list[int], numbers: list[float], lines: int) -> None:
    """Scales with room for the curves' names on the right, and for lines of text below."""
    axes.set_xscale("log", base=2)
    span = max(tokens[-1] / tokens[0], 4)
    axes.set_xlim(tokens[0] / span**0.08, tokens[-1] * span**0.5)
    axes.set_yscale("log")
    low, span = min(numbers), max(max(numbers) / min(numbers), 4)
    axes.set_ylim(low / span ** (0.1 + 1.4 * _GAP * lines), low * span**1.22)
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()


def _name(axes: matplotlib.axes.Axes, ends: list[Value], last: int) -> None:
    """Names curves: at their ends, one above the other where they meet, or above an end that others go on from."""
    to_axes, below = axes.transData + axes.transAxes.inverted(), -1.0
    for height, end in sorted((to_axes.transform((end.tokens, end.number))[1], end) for end in ends):
        place, align = (7, 0), {"va": "center"}
        if end.tokens < last:
            place, align = (0, 8), {"ha": "center"}
        else:
            height = below = max(height, below + 0.75 * _GAP)
        at = (end.tokens, height), axes.get_xaxis_transform()
        axes.annotate(end.name, at[0], place, at[1], "offset points", **align, **_text(end.look))


def _text(look: str) -> dict[str, Any]:
    """Of a text about a curve: its colour, dark enough to be read, and nothing behind it."""
    dark = tuple(0.65 * part for part in matplotlib.colors.to_rgb(_LOOKS[look]["color"]))
    return {"color": dark, "fontsize": _POINTS, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _bars(axes: matplotlib.axes.Axes, claim: Claim) -> None:
    """A bar for each value, with its number or how it failed behind it."""
    for place, value in enumerate(claim.values):
        fits = value.status == "ok"
        look = {"color": _LOOKS[value.look]["color"], "alpha": 1.0}
        if value.look == "claimed":
            look = {"facecolor": "white", "edgecolor": look["color"], "linestyle": ":", "linewidth": 1.5}
        axes.barh(place, value.number if fits else 0.0, **look)
        told = f"{value.number:,.3g}" if fits else value.status
        axes.text(value.number if fits else 0.0, place, f"  {told}", va="center", fontsize=_POINTS)
    axes.set_yticks(range(len(claim.values)), [value.name for value in claim.values])
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel(claim.unit, fontsize=_POINTS)
