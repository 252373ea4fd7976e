"""The page of a runs folder: nothing left out, nothing believed to be HTML, nothing fetched from outside."""

import html
import json
import pathlib
import re
import subprocess
import sys

import pytest

from analysis import collect, report
from research.errors import ConfigError

CONFIG = {"seed": 0, "model": {"layers": ["hca"], "hidden": 64}, "run": {"root": "<runs> & more"}}
OK = {"status": "ok", "final_loss": 2.0, "val_loss": 2.1, "step_seconds": 0.125, "temp_bytes": 5 * 2**20}


def write(folder, summary, steps=3, config=CONFIG, cut=""):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text(json.dumps({"date": "2026-01-01", "python": "3.11"}))
    lines = [json.dumps({"step": step, "loss": 5.0 - step}) + "\n" for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines) + cut)
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def runs(tmp_path):
    sweep = tmp_path / "runs" / "a<sweep>&"
    write(sweep / "good", OK | {"overrides": {"model.hidden": 64, "run.id": "good", "wandb.mode": "disabled"}})
    failure = {"status": "out of memory", "message": "<script>alert(1)</script> & /machine/folder/log.txt"}
    other = CONFIG | {"model": {"layers": ["csa"], "hidden": 32}}
    write(sweep / "failed", failure | {"overrides": {"model.hidden": 32}}, steps=0, config=other)
    write(sweep / "half<written>", None, cut='{"step": 4, "lo')
    (sweep / "not_started").mkdir()
    (sweep / "not_started" / "log.txt").touch()
    write(tmp_path / "runs" / "alone", OK)
    write(tmp_path / "runs" / "damaged", OK)
    (tmp_path / "runs" / "damaged" / "config.json").write_text('{"seed": ')
    (tmp_path / "runs" / "presets").mkdir()
    return tmp_path / "runs"


def measured(folder, **fields):
    folder.mkdir(parents=True)
    row = {
        "visibility": "hca",
        "backend": "splash",
        "seq_len": 1024,
        "dtype": "float32",
        "phase": "forward_backward",
        "date": "2026-01-02T03:04:05",
        **fields,
    }
    numbers = {"compile_seconds": 1.5, "temp_bytes": 2**20, "effective": {"backend": "splash", "schedule": "static"}}
    rows = [
        row | numbers | {"status": "ok"},
        row | {"status": "out of SMEM", "message": "4 KiB < 5 KiB", "seq_len": 2048},
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"half')


def text(page):
    return html.unescape(re.sub(r"<[^>]*>", "\n", page))


def lines(page):
    """The lines of all tables, as lists of what their cells say."""
    found = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", line, re.DOTALL)] for line in found]


def test_every_point_is_there_however_it_ended(runs):
    page = report.page(runs)
    points = {line[1]: line[-1] for line in lines(page) if len(line) > 2}
    assert points == {
        "64": "ok",
        "32": "out of memory",
        "half<written>": "unfinished",
        "not_started": "unfinished",
    }
    told = text(page)
    assert "4 points, 1 finished" in told
    assert "the last step on record is 3" in told
    assert "damaged: unreadable: DamagedError" in told
    assert ["val_loss", "2.1"] in lines(page)
    assert page.count("<img") == 2  # of the sweep, and of the run alone


def test_shared_config_leaves_out_what_differs(runs):
    details = re.search(r"config that the points share</summary><pre>(.*?)</pre>", report.page(runs), re.DOTALL)
    assert json.loads(html.unescape(details[1])) == {"seed": 0, "model": {}, "run": {"root": "<runs> & more"}}


def test_names_and_messages_are_text(runs):
    page = report.page(runs)
    for raw in ("<sweep>", "<script>", "half<written>", "<runs>"):
        assert raw not in page
        assert raw in text(page)


def test_page_opens_offline_in_light_and_dark(runs):
    page = report.page(runs)
    assert not re.search(r"https?://|@import|url\(|<link|<script", page)
    sources = re.findall(r'src="(.{22})', page)
    assert sources
    assert set(sources) == {"data:image/png;base64,"}
    assert "prefers-color-scheme: dark" in page


def test_what_was_measured_without_a_model(runs):
    measured(runs / "bench" / "cpu", seconds=0.25)
    modelled = {"roofline_seconds": 0.002, "useful_flops": 1e9, "scheduled_flops": 4e9, "peak_bytes": 2**30}
    measured(runs / "aot" / "tpu", topology="v5p:2x2x1", what="op", schedule="static", **modelled)
    page = report.page(runs)
    told = {" | ".join(line) for line in lines(page)}
    assert "hca splash | 1,024 | float32 | forward+backward | 0.2500 | 1.50 | 1.0 | 2026-01-02 | ok" in told
    assert "op hca static | 1,024 | float32 | forward+backward | 1.50 | 1.0 | 1,024.0 | 2.0 | 2026-01-02 | ok" in told
    assert sum(line[-1:] == ["out of SMEM"] for line in lines(page)) == 2
    assert "op hca static, 2,048 tokens, forward_backward: out of SMEM: 4 KiB < 5 KiB" in text(page)
    assert page.count("<img") == 4


def test_damaged_results_do_not_hide_the_others(runs):
    measured(runs / "bench" / "cpu")
    (runs / "bench" / "cpu" / "results.jsonl").write_text("{\n{}\n")
    measured(runs / "bench" / "killed")
    (runs / "bench" / "killed" / "results.jsonl").write_text('{"visib')
    told = text(report.page(runs))
    assert "cannot be read: DamagedError" in told
    assert "no row is finished" in told
    assert "4 points, 1 finished" in told


@pytest.mark.slow
def test_reading_changes_nothing_in_the_runs(runs):
    def touched():
        return {path: path.stat().st_mtime_ns for path in runs.rglob("*")}

    before = touched()
    report.page(runs)
    report.page(runs / "alone")
    assert touched() == before
    # The page of a single run lies beside its folder.
    root, command = pathlib.Path(__file__).parents[2], [sys.executable, "launch/report.py", f"--runs={runs / 'alone'}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == f"{runs / 'alone.html'}\n"
    (runs / "alone.html").unlink()
    assert touched() == before


def test_one_sweep_or_one_run(runs):
    assert "alone" not in text(report.page(runs / "a<sweep>&" / "good"))
    rows = [{"point": "failed", "overrides": {"seed": 7}, "layers": ["csa"], "status": "killed by SIGKILL"}]
    rows += [{"point": "gone", "overrides": {"seed": 8}, "layers": ["csa"], "status": "ok"}]
    (runs / "a<sweep>&" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    points = [(line[1], line[-1]) for line in lines(report.page(runs / "a<sweep>&"))[1:]]
    # First those of results.jsonl, named as they are there; how they ended is asked of their folders.
    assert points[:2] == [("7", "out of memory"), ("8", "ok")]
    assert {name for name, _ in points[2:]} == {"64", "half<written>", "not_started"}


def test_collected_rows_hold_what_is_plotted_and_no_path(runs, tmp_path):
    target = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "analysis.collect", str(runs / "a<sweep>&"), str(target)]
    subprocess.run(command, check=True, capture_output=True)
    content = target.read_text()
    rows = {row["point"]: row for row in map(json.loads, content.splitlines())}
    assert rows["good"]["metrics"] == [{"step": step, "loss": 5.0 - step} for step in (1, 2, 3)]
    assert rows["good"]["overrides"] == {"model.hidden": 64}
    assert rows["failed"]["message"].endswith("& log.txt")
    assert rows["half<written>"]["status"] == collect.UNFINISHED
    assert str(tmp_path) not in content


@pytest.mark.parametrize("make", [lambda folder: folder.mkdir(), lambda folder: None])
def test_folder_without_a_run_is_named(tmp_path, make):
    make(tmp_path / "empty")
    with pytest.raises(ConfigError, match=re.escape(f"--runs={tmp_path / 'empty'}: ")):
        report.page(tmp_path / "empty")
