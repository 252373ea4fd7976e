import json

import pytest

from experiments import indexer_stages
from research.sweeps import experiment


def chain(folder, recalls, status="ok"):
    """Rows of a sweep, whose stages end with these recalls."""
    rows = []
    for number, recall in enumerate(recalls):
        (folder / str(number)).mkdir(parents=True)
        last = {"val_loss": 2.0, "val_indexer_recall": recall, "val_indexer_useful": 0.3}
        entries = [{"step": 1, "loss": 3.0, "indexer_kl": 1.0}, {"step": 2, "loss": 2.0, **last}]
        (folder / str(number) / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        rows.append({"folder": str(folder / str(number)), "status": status, "overrides": {}})
    return rows


def test_check_wants_the_recall_to_rise(tmp_path):
    lines = indexer_stages.check(chain(tmp_path / "good", (0.2, 0.7, 0.6)))
    assert lines[0] == "recall 0.20 before the warm-up, 0.70 after it, 0.60 at the end; 0.30 by chance"
    assert (tmp_path / "good" / "stages.png").stat().st_size > 10_000
    for name, recalls in {"fell": (0.8, 0.7, 0.9), "chance": (0.1, 0.3, 0.9)}.items():
        with pytest.raises(experiment.CheckError, match="before the warm-up"):
            indexer_stages.check(chain(tmp_path / name, recalls))


def test_check_says_when_there_is_nothing_to_compare(tmp_path):
    lines = indexer_stages.check(chain(tmp_path, (0.2, 0.7, 0.6), status="nan loss"))
    assert lines == ["the stages did not all finish: no recall to compare"]
    brief = {"folder": str(tmp_path), "status": "ok", "overrides": {"attention.backend": "splash"}}
    assert indexer_stages.check([brief] * 3) == lines  # a sweep narrowed to its brief points


@pytest.mark.parametrize("arg", indexer_stages.ARGS)
def test_every_stage_starts_from_the_one_before(arg):
    stages = indexer_stages.sweep(arg)[:3]
    labels, points = [stage.label for stage in stages], [stage.overrides for stage in stages]
    assert [stage.after for stage in stages] == [(), *((label,) for label in labels[:2])]
    assert [point["attention.csa_stage"] for point in points] == ["dense", "warmup", "sparse"]
    assert [point.get("train.start_from", "") for point in points[1:]] == labels[:2]
