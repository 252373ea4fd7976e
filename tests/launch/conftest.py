import pytest

from research import sweep

# Stands in for launch/train.py: ends as the learning rate of the point demands, and notes when it ran.
FAKE = """
import json, os, pathlib, signal, sys, time
values = dict(argument.removeprefix("--config.").split("=", 1) for argument in sys.argv[1:])
folder = pathlib.Path(values["run.root"]) / values["run.id"]
with open(folder / "ran", "a") as file:
    file.write(f"{time.time()} ")
    time.sleep(float(os.environ.get("FAKE_SECONDS", 0)))
    file.write(f"{time.time()}\\n")
if values["optimizer.learning_rate"] == "1e+30":
    os.kill(os.getpid(), signal.SIGKILL)
(folder / "summary.json").write_text(json.dumps({"status": "ok", "final_loss": 1.5}))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Points of a sweep run a script that ends at once; returns the overrides that are common to them."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(sweep, "_TRAIN", script)
    return {"run.root": str(tmp_path / "runs")}
