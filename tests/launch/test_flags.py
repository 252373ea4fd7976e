import pathlib
import re

from launch import line, train

ROOT = pathlib.Path(__file__).parents[2]
TARGET = f"--config={ROOT}/tests/tiny.py"


def test_good_command_lines_are_read():
    found = line.read(
        [TARGET, "--config.attention.window=8", "--noconfig.attention.sinks", "-config.seed", "3", "--fresh"]
    )
    assert found.overrides == {"attention.window": 8, "attention.sinks": False, "seed": 3}
    assert found.rest == ["--fresh"]
    found = line.read(["--config.seed=2", "--config", f"{ROOT}/tests/tiny.py:", "--config.seed=1e1"])
    assert line.canonical(found) == [f"--config={ROOT}/tests/tiny.py:", "--config.seed=10"]
    assert line.read(["--fresh", "--config.seed=2"]).rest == ["--fresh", "--config.seed=2"]


def test_an_experiment_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = line.read(["--config=experiments/recall.py:demo"])
    assert line.canonical(found) == [f"--config={ROOT}/experiments/recall.py:demo"]
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "recall.py").write_text((ROOT / "tests" / "tiny.py").read_text())
    assert line.canonical(line.read(["--config=experiments/recall.py"])) == ["--config=experiments/recall.py"]


def test_default_id_tells_when_what_and_how():
    identity = train.default_id("experiments/mask_strategies.py:demo", {"attention.block_q": 256})
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}-mask_strategies-demo-block_q=256", identity)
    assert identity != train.default_id("experiments/mask_strategies.py:demo", {"attention.block_q": 256})
