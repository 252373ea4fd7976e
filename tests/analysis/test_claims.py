"""A claim's verdict follows from its tests, and the picture says all of it where it can be read."""

import math
import pathlib

import matplotlib.text
import pytest

from analysis import claims, style
from analysis.claims import Claim, Value
from experiments import seed_claims
from research.runs import files

RESULTS = pathlib.Path(__file__).parents[2] / "analysis" / "results" / "seed_claims.jsonl"


def claim(tests, values=(), **others):
    return Claim("000", "a thing is so", "MiB", [*values], tests, ["2 of them"], **others)


@pytest.mark.parametrize(
    ("tests", "verdict"),
    [
        ([True, True], "confirmed, 2 of 2"),
        ([True, False, False], "partly, 1 of 3"),
        ([False], "refuted, 0 of 1"),
        ([], "not measurable here"),
    ],
)
def test_verdict_counts_the_tests(tests, verdict):
    assert claim(tests).lines == [f"000: a thing is so -> {verdict}", "    2 of them"]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws claims and returns the figure."""

    def draw(shown):
        kept = []
        with monkeypatch.context() as patch:
            patch.setattr(style, "save", lambda figure, file: kept.append(figure))
            claims.draw(shown, tmp_path / "x.png")
        style.save(kept[0], tmp_path / "x.png")
        return kept[0]

    return draw


def texts(figure):
    return [text for text in figure.findobj(matplotlib.text.Text) if text.get_text() and text.get_visible()]


@pytest.mark.parametrize("bars", [False, True])
def test_failures_keep_their_place(drawn, bars):
    values = [Value("static", "static", 1024, 2.0), Value("dynamic", "dynamic", 4096, math.nan, "out of SMEM")]
    told = [text.get_text().strip() for text in texts(drawn([claim([True], values, bars=bars)]))]
    assert ("out of SMEM" if bars else "dynamic at 4k: out of SMEM") in told
    assert {"confirmed, 1 of 1", "000: a thing is so", "static"} <= set(told)


def test_committed_claims_are_readable(drawn):
    shown = seed_claims.claims(files.read_lines(RESULTS))
    figure = drawn(shown)
    assert sum(text.get_text() == "MaxText" for text in texts(figure)) == 4
    told = [one.told for one in shown]
    assert [text.get_text() for text in texts(figure) if text.get_text() in told] == told
    assert min(text.get_fontsize() for text in texts(figure)) >= 8
    panels = [axes.get_tightbbox() for axes in figure.axes]
    for panel in panels:  # nothing is cut, nor reaches into a neighbour
        assert figure.bbox.x0 <= panel.x0 <= panel.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= panel.y0 <= panel.y1 <= figure.bbox.y1
        assert sum(panel.overlaps(other) for other in panels) == 1


def test_names_at_one_end_do_not_meet(drawn):
    values = [Value(name, name, n, 5.0) for name in ("static", "dynamic", "computed") for n in (1024, 2048)]
    boxes = [text.get_window_extent() for text in texts(drawn([claim([], values)])) if text.get_text() in claims._LOOKS]
    assert len(boxes) == 3
    assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)
