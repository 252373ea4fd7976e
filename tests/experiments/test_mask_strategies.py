import json

import pytest

from experiments import mask_strategies
from research.sweeps import experiment


def row(folder, kind, losses, status="ok", dtype="float32"):
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "config.json").write_text(json.dumps({"model": {"dtype": dtype}}))
    return {"layers": [kind], "status": status, "folder": str(folder)}


def test_check_compares_points_of_one_kind_at_every_step(tmp_path):
    rows = [
        row(tmp_path / "a", "hca", [3.0, 2.0005, 1.0]),
        row(tmp_path / "b", "hca", [3.0, 2.0, 1.0]),
        row(tmp_path / "c", "sliding", [9.0, 9.0, 9.0]),
        row(tmp_path / "d", "hca", [5.0], status="nan loss"),
    ]
    assert mask_strategies.check(rows) == ["hca: 2 loss curves differ by 5.0e-04 nats at most, 1e-03 allowed"]
    rows.append(row(tmp_path / "e", "hca", [3.0, 2.002, 1.0]))
    with pytest.raises(experiment.CheckError, match=r"hca: 3 .* 2\.0e-03 nats at most, 1e-03 allowed"):
        mask_strategies.check(rows)


def test_check_allows_bfloat16_its_rounding(tmp_path):
    rows = [row(tmp_path / str(loss), "csa", [loss], dtype="bfloat16") for loss in (3.0, 3.002)]
    assert mask_strategies.check(rows)[0].endswith("2e-02 allowed")
