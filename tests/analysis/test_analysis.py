import io
import json

import matplotlib.image
import pytest
import rich.console

from analysis import plot, table

SPLASH = {
    "backend": "splash",
    "schedule": "static",
    "block_q": 128,
    "block_kv": 256,
    "block_q_dkv": 128,
    "block_kv_dkv": 256,
    "dq_reduction_steps": 3,
}


@pytest.fixture
def rows(tmp_path):
    def row(name, overrides, layers, **summary):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss": 5.0 - step}) + "\n" for step in range(1, 4)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
        return {"overrides": overrides, "layers": layers, "folder": str(tmp_path / name), **summary}

    measured = {"final_loss": 2.0, "val_bits_per_byte": 3.25, "step_seconds": 0.125, "temp_bytes": 5 * 2**20}
    return [
        row("a", {"model.layers": ["hca"]}, ["hca"], status="ok", effective={"hca": SPLASH}, **measured),
        row("b", {"model.layers": ["csa", "hca"]}, ["csa", "hca"], status="out of memory", message="too much"),
        row("c", {"model.layers": ["hca"], "seed": 1}, ["hca"], status="ok", effective={"hca": SPLASH}, **measured),
    ]


def test_table_shows_what_was_asked_used_measured_and_how_it_ended(rows):
    console = rich.console.Console(width=200, file=io.StringIO())
    console.print(table.build(rows))
    cells = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["1", *["hca", "splash", "static", "128x256", "dq", "3", "2.0000", "3.250", "0.125", "5.0", "ok"]] in cells
    assert ["2", *["csa+hca", "out", "of", "memory"]] in cells


def test_what_is_in_effect_is_told_by_kind_where_kinds_differ():
    dynamic = SPLASH | {"schedule": "dynamic", "block_q_dkv": 256}
    told = table.in_effect({"effective": {"hca": SPLASH, "csa": dynamic}})
    assert told == "hca: splash static 128x256 dq 3\ncsa: splash dynamic 128x256 backward 256x256 dq 3"
    assert table.in_effect({"effective": {"sliding": SPLASH, "hca": SPLASH}}) == "splash static 128x256 dq 3"
    assert table.in_effect({"effective": {"hca": {"backend": "blockwise", "block_q": 64}}}) == "blockwise 64"


def test_plot_is_drawn_with_a_place_for_points_that_failed(rows, tmp_path, monkeypatch):
    texts = []
    axes = plot.matplotlib.axes.Axes
    draw_text = axes.text

    def keep(self, x, y, text, **style):
        texts.append(text)
        return draw_text(self, x, y, text, **style)

    monkeypatch.setattr(axes, "text", keep)
    plot.draw(rows, ("step_seconds", "temp_bytes"), "a sweep", tmp_path / "plot.png")
    bars = ["  0.125", "  0.125", "  5", "  5", "  out of memory", "  out of memory"]
    assert sorted(texts) == [*bars, "2 curves, at most 0 nats apart"]
    image = matplotlib.image.imread(tmp_path / "plot.png")
    assert image.shape[0] > 300
    assert image.std() > 0.05


def test_points_of_one_strategy_share_a_colour_in_all_panels(rows, tmp_path, monkeypatch):
    colours = {}
    axes = plot.matplotlib.axes.Axes
    draw_bars = axes.barh

    def keep(self, places, values, color):
        colours["bars"] = color
        return draw_bars(self, places, values, color=color)

    monkeypatch.setattr(axes, "barh", keep)
    for row, schedule, size in zip(rows, ("static", "dynamic", "static"), (128, 128, 256), strict=True):
        row["overrides"] |= {"attention.backend": "splash", "attention.schedule": schedule, "attention.block_q": size}
    plot.draw(rows, ("step_seconds",), "a sweep", tmp_path / "plot.png")
    static, other_size, dynamic = colours["bars"]  # the two of HCA, then the one of CSA and HCA
    assert static == other_size != dynamic


def test_agreement_is_told_where_it_cannot_be_seen():
    first, second = {1: 3.0, 2: 1.0}, {1: 3.0, 2: 1.5, 3: 1.0}
    assert plot._agreement([first, {1: 3.0, 2: 1.001}]) == "2 curves, at most 0.001 nats apart"
    assert plot._agreement([first, second]) == plot._agreement([first]) == plot._agreement([first, {5: 1.0}]) == ""
