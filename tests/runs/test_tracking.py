"""wandb holds what metrics.jsonl holds, and whatever happens to it costs one line: real wandb, real kills."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from research import errors
from research.errors import ConfigError
from research.runs import files, mirror, tracking
from research.runs.folder import read_rows
from research.settings.config import read
from tests import tiny


@pytest.fixture(autouse=True)
def logged_out(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-such-file"))


def tracker(folder, mode="disabled"):
    config = tiny.get_config()
    config.wandb.mode = mode
    return tracking.Tracker(folder, read(config), said.append)


said: list[str] = []


@pytest.fixture(autouse=True)
def silence():
    said.clear()


def sent(folder):
    """Steps in wandb's files, in the order of starts."""
    return [mirror.sent_steps(record) for record in sorted((folder / "wandb").glob("*run-*/*.wandb"))]


def descendants(process):
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False).stdout.split()
    return [child for pid in map(int, found) for child in (pid, *descendants(pid))]


def test_rows_are_on_the_disk_as_soon_as_they_are_logged(tmp_path):
    with tracker(tmp_path) as open_tracker:
        open_tracker.ready()
        open_tracker.log(1, {"loss": 2.5})
        assert read_rows(tmp_path) == [{"step": 1, "loss": 2.5}]
        open_tracker.log(2, {"loss": 2.25})
        assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.slow
def test_each_start_sends_what_the_ones_before_it_lack(tmp_path):
    """Under one id; also rows that were logged while there was no wandb, and none that it has."""
    with tracker(tmp_path, "offline") as first:
        first.ready()
        for step in (1, 2, 3):
            first.log(step, {"loss": 1 / step})
        first.summarize({"final_loss": 0.5})
    files.append_line(tmp_path / "metrics.jsonl", {"step": 4, "loss": 0.25})
    with tracker(tmp_path, "auto") as second:  # logged out
        second.ready()
        second.log(5, {"loss": 0.2})
    assert sent(tmp_path) == [[1, 2, 3], [4, 5]]
    records = [*(tmp_path / "wandb").glob("offline-run-*")]
    assert {record.name.rpartition("-")[2] for record in records} == {(tmp_path / "wandb_id").read_text()}
    assert said == []


KILLED = """
import os, pathlib, signal, sys
from tests.runs.test_tracking import tracker
t = tracker(pathlib.Path(sys.argv[1]), "offline")
t.ready()
first, last = map(int, sys.argv[2:])
for step in range(first, last + 1):
    t.log(step, {"loss": 1 / step, "x": 1.0})
print("logged", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "with_wandb",
    [
        pytest.param(False, id="run", marks=pytest.mark.slow),
        pytest.param(True, id="run and wandb", marks=pytest.mark.slow),
    ],
)
def test_union_of_wandbs_files_has_every_step_once_after_kills(tmp_path, with_wandb):
    """wandb writes its files in blocks: what was in the last one is lost with it, and sent by the next start."""
    for first, last in ((1, 12), (10, 200)):
        files.write_lines(tmp_path / "metrics.jsonl", [r for r in read_rows(tmp_path) if r["step"] < first])
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), str(first), str(last)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "logged\n"
        if with_wandb:
            for child in descendants(process.pid):
                os.kill(child, signal.SIGKILL)
        process.communicate("\n")
        assert process.returncode == -signal.SIGKILL
    with tracker(tmp_path, "offline") as last:
        last.ready()
        last.log(201, {"loss": 0.0})
    steps = [step for record in sent(tmp_path) for step in record]
    assert steps == [*range(1, 202)]  # in order, too: what is synchronised later goes up in this order


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGKILL))],
)
def test_signal_to_all_of_wandb_costs_one_line(tmp_path, number):
    """As Slurm sends it to every process of a job."""
    with tracker(tmp_path, "offline") as first:
        first.ready()
        first.log(1, {"loss": 1.0})
        children = descendants(first._mirror._process.pid)
        assert "wandb-core" in {pathlib.Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}
        handler = signal.signal(signal.SIGTERM, lambda *_: None)  # of the run itself, which wandb may ask to stop
        for pid in (first._mirror._process.pid, *children):
            os.kill(pid, number)
        time.sleep(1)
        first.log(2, {"loss": 0.5})
    signal.signal(signal.SIGTERM, handler)
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2]
    assert len(said) == 1
    assert said[0].startswith("wandb: ")
    assert said[0].endswith(f"; all rows are in {tmp_path}/metrics.jsonl")
    with tracker(tmp_path, "offline") as second:
        second.ready()
    assert sorted(step for record in sent(tmp_path) for step in record) == [1, 2]


def test_wandb_that_hangs_does_not_hold_the_run_up(tmp_path, monkeypatch):
    monkeypatch.setitem(tracking._END_SECONDS, "offline", 2.0)
    start = tracker(tmp_path, "offline")
    with start:
        start.ready()
        stopped = descendants(start._mirror._process.pid)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        before = time.monotonic()
        for step in range(1, 2001):
            start.log(step, {"loss": 1.0, "text" * 10: 2.0})
    assert time.monotonic() - before < 20
    assert len(read_rows(tmp_path)) == 2000
    assert len(said) == 1
    assert f"still sends after 2 s, and goes on behind (process {start._mirror._process.pid})" in said[0]
    for pid in (start._mirror._process.pid, *stopped):
        os.kill(pid, signal.SIGKILL)


def test_wandb_that_cannot_be_started_costs_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_PROGRAM", "research.runs.no_such_module")
    with tracker(tmp_path, "offline") as start:
        start.ready()
        start.log(1, {"loss": 1.0})
    assert read_rows(tmp_path) == [{"step": 1, "loss": 1.0}]
    assert said == ["wandb: does not start; the run goes on without it"]


class Server:
    """A port of this machine: 'refuses', or 'is silent' to whoever connects."""

    def __init__(self, kind):
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        if kind == "is silent":
            self.socket.listen()
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("refuses", "auto"),
        ("refuses", "online"),
        ("is silent", "online"),
        pytest.param("is silent", "auto", marks=pytest.mark.slow),
    ],
)
def test_server_that_cannot_be_reached(tmp_path, monkeypatch, kind, mode):
    """Within seconds: `auto` goes on offline and says so, `online` is refused."""
    server = Server(kind)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    before = time.monotonic()
    reason = "Connection refused" if kind == "refuses" else "timed out"
    with tracker(tmp_path, mode) as start:
        if mode == "online":
            told = rf"^config\.wandb\.mode='online': {server.url} cannot be reached \(.*{reason}"
            with pytest.raises(ConfigError, match=told):
                start.ready()
            assert not (tmp_path / "wandb").exists()
        else:
            start.ready()
            assert len(said) == 1
            assert said[0].startswith(f"wandb: {server.url} cannot be reached (")
            assert said[0].endswith("; recording offline")
            start.log(1, {"loss": 1.0})
    assert time.monotonic() - before < 30
    assert sent(tmp_path) == ([[1]] if mode == "auto" else [])
    server.socket.close()


FAKE_WANDB = """
import json, os, pathlib, sys
class _Run:
    starting_step, summary = int(os.environ.get("FAKE_STEP", 0)), {}
    def _note(self, *what):
        with open(os.environ["FAKE_NOTES"], "a") as file:
            file.write(json.dumps(what) + "\\n")
    def log(self, row, step):
        self._note("log", step, row)
    def mark_preempting(self):
        self._note("preempting")
    def finish(self, exit_code=0):
        self._note("finish", exit_code, self.summary)
class Settings:
    base_url = os.environ.get("WANDB_BASE_URL", "")
    def __init__(self, **_): pass
class setup:
    settings = Settings()
def login(**_): return True
def init(**given):
    run = _Run()
    run._note("init", given["mode"], given["id"], given["resume"])
    return run
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A module in wandb's place, that notes what it is asked; and a server that answers. Returns the notes."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("FAKE_NOTES", str(tmp_path / "notes"))
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    yield lambda: [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    server.close()


@pytest.mark.parametrize(
    ("error", "marks", "code"),
    [(None, 0, 0), (errors.InterruptedRunError("SIGTERM"), 1, 1), (errors.NonFiniteLossError("nan"), 0, 1)],
)
def test_wandb_learns_how_the_run_ended(tmp_path, fake, error, marks, code):
    """A sweep's agent takes a run that was marked as preempted up again."""
    (tmp_path / "run").mkdir()
    try:
        with tracker(tmp_path / "run", "online") as start:
            start.ready()
            start.log(1, {"loss": 1.0})
            start.summarize({"final_loss": 1.0})
            if error is not None:
                raise error
    except type(error):
        pass
    told = fake()
    assert told[0] == ["init", "online", (tmp_path / "run" / "wandb_id").read_text(), "allow"]
    assert told[1] == ["log", 1, {"loss": 1.0}]
    assert told.count(["preempting"]) == marks
    assert told[-1] == ["finish", code, {"final_loss": 1.0}]
    assert said == []


def test_a_server_is_sent_what_it_lacks(tmp_path, fake, monkeypatch):
    """It says how far it is."""
    (tmp_path / "run").mkdir()
    files.write_lines(tmp_path / "run" / "metrics.jsonl", [{"step": step} for step in range(1, 6)])
    monkeypatch.setenv("FAKE_STEP", "4")  # the next one that it expects
    with tracker(tmp_path / "run", "auto") as start:
        start.ready()
        start.log(6, {})
    assert [told[1] for told in fake() if told[0] == "log"] == [4, 5, 6]


def test_table_is_sent_and_its_failure_is_a_warning(tmp_path, monkeypatch):
    config = tiny.get_config()
    config.wandb.mode = "offline"
    rows = [{"name": "a", "seconds": 0.5, "effective": {}}, {"name": "b"}] * 300  # more than a pipe holds
    tracking.send_table(tmp_path, read(config), "bench", rows)
    assert sent(tmp_path) == [[600]]
    monkeypatch.setattr(tracking, "_PROGRAM", "research.runs.no_such_module")
    with pytest.warns(UserWarning, match=rf"^wandb: does not start.*; the rows are in {tmp_path}$"):
        tracking.send_table(tmp_path, read(config), "bench", rows)


def test_wandb_offline_needs_no_network(tmp_path):
    """In a process of its own whose every connection beyond this machine fails, and its children's, too."""
    unshare = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not make a network namespace here")
    script = f"""
import pathlib
from tests.runs.test_tracking import tracker, said
with tracker(pathlib.Path({str(tmp_path)!r}), "auto") as t:
    t.ready()
    t.log(1, {{"loss": 1.0}})
assert said == [], said
"""
    done = subprocess.run([*unshare, sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert sent(tmp_path) == [[1]]
