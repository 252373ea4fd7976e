import json
import os
import pathlib
import subprocess
import sys

import pytest

from research.errors import ConfigError
from research.runs import files
from research.sweeps import sweep

ROOT = pathlib.Path(__file__).parents[2]
TARGET = f"{ROOT}/tests/tiny.py"


def run(common, fresh=False, parallel=1):
    rows = dict(sweep.run(sweep.plan(TARGET, common, "cpu", fresh), fresh, parallel, lambda place, text: None))
    return [rows[place] for place in range(len(rows))]


def times(row):
    """Start and end of every time it ran."""
    return [line.split() for line in (pathlib.Path(row["folder"]) / "ran").read_text().splitlines()]


def ran(row):
    return len(times(row))


def test_crash_costs_one_point_and_is_a_row(fake):
    good, bad = run(fake)
    assert (good["status"], good["final_loss"]) == ("ok", 1.5)
    assert good["overrides"] == {"optimizer.learning_rate": 1e-3}
    assert good["folder"] == f"{fake['run.root']}/tiny/learning_rate=0.001"
    assert bad["status"] == "killed by SIGKILL"
    assert bad["message"].endswith("log.txt")


def test_finished_points_are_kept_and_failed_ones_tried_again(fake):
    assert [ran(row) for row in run(fake)] == [1, 1]
    assert [ran(row) for row in run(fake)] == [1, 2]
    assert [ran(row) for row in run(fake, fresh=True)] == [1, 1]  # the folders are new


@pytest.mark.parametrize("parallel", [1, 2])
def test_as_many_run_at_a_time_as_asked(fake, parallel, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "1.5")
    (((first, end),), ((second, last),)) = map(times, run(fake, parallel=parallel))
    overlap = min(float(end), float(last)) - max(float(first), float(second))
    assert (overlap > 0) == (parallel == 2)


def test_points_that_wait_do_not_start_after_an_interruption(fake):
    points = sweep.plan(TARGET, fake, "cpu", fresh=False)

    def interrupt(place, text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(sweep.run(points, False, 1, interrupt))
    assert not any(point.folder.exists() for point in points)


def test_notes_say_what_is_run_and_what_is_not(fake):
    run(fake)
    notes = []
    points = sweep.plan(TARGET, fake, "cpu", fresh=False)
    list(sweep.run(points, False, 1, lambda *note: notes.append(note)))
    assert notes[0] == (0, "finished before")
    assert notes[1][0] == 1
    assert "--config.optimizer.learning_rate=1e+30" in notes[1][1]


def test_common_overrides_reach_every_point_and_name_the_folder(fake):
    rows = run(fake | {"train.steps": 5})
    assert all("--config.train.steps=5" in row["command"] for row in rows)
    assert all("/tiny-steps=5/" in row["folder"] for row in rows)


def test_override_of_what_the_sweep_sets_narrows_it_or_is_refused(fake):
    (narrowed,) = sweep.plan(TARGET, fake | {"optimizer.learning_rate": 1e30}, "cpu", fresh=False)
    assert narrowed == sweep.plan(TARGET, fake, "cpu", fresh=False)[1]
    with pytest.raises(ConfigError, match=r"config\.optimizer\.learning_rate=1\.0: must be 0\.001 or 1e\+30, one of"):
        sweep.plan(TARGET, fake | {"optimizer.learning_rate": 1.0}, "cpu", fresh=False)
    with pytest.raises(ConfigError, match=r"config\.run\.id: is set by the sweep itself"):
        sweep.plan(TARGET, fake | {"run.id": "x"}, "cpu", fresh=False)


def test_invalid_points_are_all_named_before_any_is_run(fake, tmp_path):
    with pytest.raises(ConfigError, match=r"^config.attention.window=0: must be positive; so it is at each of the 2"):
        sweep.plan(TARGET, fake | {"attention.window": 0}, "cpu", fresh=False)
    grid = f"{ROOT}/tests/points.py:grid"
    some = r"^2 of the 4 points of .* cannot be run:\n  backend=dot_product.*block_q=64.*\n  backend=splash.*block_q=64"
    with pytest.raises(ConfigError, match=some):
        sweep.plan(grid, fake | {"attention.block_q": 64}, "cpu", fresh=False)
    assert not (tmp_path / "runs").exists()


def test_results_of_other_settings_are_not_taken_for_these(fake):
    (point, _) = sweep.plan(TARGET, fake, "cpu", fresh=False)
    point.folder.mkdir(parents=True)
    files.write_json(point.folder / "config.json", {"model": {"hidden": 1}})
    with pytest.raises(ConfigError, match=r"model\.hidden: 1 there, 32 here(.|\n)*--fresh replaces it"):
        sweep.plan(TARGET, fake, "cpu", fresh=False)
    assert len(sweep.plan(TARGET, fake, "cpu", fresh=True)) == 2


@pytest.mark.slow
def test_sweep_from_the_command_line(tmp_path):
    """Real training: one point ends well, one diverges; table, rows, plot and exit code tell."""
    command = [sys.executable, ROOT / "launch" / "sweep.py", f"--config={TARGET}", "--config.train.steps=3"]
    done = subprocess.run(
        [*command, f"--config.run.root={tmp_path}"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    folder = tmp_path / "tiny-steps=3"
    good, bad = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert good["status"] == "ok"
    assert good["val_bits_per_byte"] > 0
    assert bad["status"] == "nan loss"
    assert bad["message"].startswith("loss is nan at step 2; state and batch are in ")
    assert "1e+30: nan loss: loss is nan at step 2" in done.stdout
    assert "1 of 2 agree" in done.stdout
    lines = done.stdout.splitlines()
    assert lines[-2:] == [f"results: {folder / 'results.jsonl'}", f"plot: {folder / 'plot.png'}"]
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in done.stdout + done.stderr
