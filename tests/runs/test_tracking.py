import contextlib
import json
import os
import subprocess
import sys
from unittest import mock

import pytest

from research import errors
from research.runs import files, tracking
from research.runs.folder import read_rows
from tests import tiny


def tracker(folder, mode="disabled"):
    config = tiny.get_config()
    config.wandb.mode = mode
    return tracking.Tracker(folder, config)


def test_rows_are_on_the_disk_as_soon_as_they_are_logged(tmp_path):
    with tracker(tmp_path) as open_tracker:
        open_tracker.log(1, {"loss": 2.5})
        assert read_rows(tmp_path) == [{"step": 1, "loss": 2.5}]
        open_tracker.log(2, {"loss": 2.25})
        assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_numbers_that_json_does_not_know_are_refused(tmp_path):
    with tracker(tmp_path) as open_tracker, pytest.raises(ValueError, match="JSON compliant"):
        open_tracker.log(1, {"loss": float("nan")})


def test_rows_after_a_checkpoint_and_a_line_cut_short_are_dropped(tmp_path):
    lines = [json.dumps({"step": step, "loss": step / 3}) + "\n" for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 6, "lo')
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3, 4, 5]
    tracking.drop_rows_after(tmp_path, 3)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:3])


def test_json_survives_a_kill_while_it_is_written(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    files.write_json(path, {"status": "ok"})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        files.write_json(path, {"status": "error"})
    assert files.read_json(path) == {"status": "ok"}


@pytest.mark.parametrize(
    ("error", "marks", "code"),
    [(None, 0, 0), (errors.InterruptedRunError("SIGTERM"), 1, 1), (errors.NonFiniteLossError("nan"), 0, 1)],
)
def test_wandb_learns_how_the_run_ended(tmp_path, monkeypatch, error, marks, code):
    """A sweep's agent takes a run that was marked as preempted up again."""
    wandb = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with contextlib.suppress(Exception), tracker(tmp_path, "offline"):
        if error is not None:
            raise error
    assert wandb.init.return_value.mark_preempting.call_count == marks
    wandb.init.return_value.finish.assert_called_once_with(exit_code=code)


def test_wandb_offline_needs_no_network_and_keeps_its_id(tmp_path):
    """In a process of its own whose every connection beyond this machine fails."""
    script = f"""
import pathlib, socket
connect = socket.socket.connect
def local_only(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
        print("connects to", address)
        raise OSError("no network")
    return connect(self, address)
socket.socket.connect = local_only
from tests.test_tracking import tracker
for step in (1, 2):
    with tracker(pathlib.Path({str(tmp_path)!r}), "auto") as t:
        t.log(step, {{"loss": 1.0}})
        t.summarize({{"final_loss": 1.0}})
"""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment = inherited | {
        "JAX_PLATFORMS": "cpu",
        "NETRC": str(tmp_path / "no-such-file"),
        "HTTPS_PROXY": "http://127.0.0.1:9",
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
    identity = (tmp_path / "wandb_id").read_text()
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert folders
    assert all(identity in name for name in folders)
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2]
