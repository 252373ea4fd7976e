import json

import pytest

from analysis import recall as picture
from experiments import recall
from research.sweeps import experiment


def row(folder, layers, near, far, window=8, **overrides):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model": {"repeats": 1}, "attention": {"window": window}}))
    return {
        "point": "+".join(layers),
        "layers": layers,
        "status": "ok",
        "folder": str(folder),
        "overrides": {"model.layers": layers, **overrides},
        "val_accuracy_8_to_15": near,
        "val_accuracy_16_to_31": far,
    }


def test_check_lets_sliding_layers_guess_and_no_more(tmp_path):
    sliding, csa = ("sliding", "sliding"), ("csa", "csa")
    rows = [row(tmp_path / "a", sliding, 0.5, 0.08), row(tmp_path / "b", csa, 0.9, 0.8)]
    assert recall.check(rows) == [
        "sliding+sliding: 8 to 15 0.50, 16 to 31 0.08",
        "csa+csa: 8 to 15 0.90, 16 to 31 0.80",
    ]
    rows.append(row(tmp_path / "c", sliding, 0.9, 0.9, window=64, **{"attention.window": 64}))
    rows.append(row(tmp_path / "d", sliding, 0.9, 0.9, **{"attention.backend": "splash"}))
    assert len(recall.check(rows)) == 3
    rows.append(row(tmp_path / "e", sliding, 0.5, 0.3))
    with pytest.raises(experiment.CheckError, match=r"sliding\+sliding answers 0\.30 beyond 14 tokens"):
        recall.check(rows)


def test_picture_is_drawn(tmp_path):
    rows = [
        row(tmp_path / "a", ("csa",), 0.5, 0.1),
        row(tmp_path / "b", ("hca",), 0.9, 0.8, **{"attention.backend": "splash"}),
    ]
    picture.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
