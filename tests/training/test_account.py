"""What a run tells of its cost: FLOPs, a trace, memory, and all of it without training."""

import gzip
import io
import json
import re

import jax
import numpy as np
import pytest
import rich.console

from research.config import ConfigError, base_config
from research.measure import chips
from research.model import spec as model_spec
from research.training import dry_run, flops, optimizer, profile, run
from research.training import step as step_lib
from tests import oracles, tiny


def shapes(config):
    spec = model_spec.from_config(config)
    return spec, jax.eval_shape(lambda: step_lib.init(spec, optimizer.build(config), 0))


@pytest.mark.parametrize(
    ("tied", "stage", "weight"),
    [(True, "sparse", 1.0), (False, "sparse", 1.0), (True, "sparse", 0.0), (True, "dense", 1.0), (True, "warmup", 1.0)],
)
def test_flops_are_counted_by_hand(tied, stage, weight):
    """Twice the parameters of every product, and the visible pairs one by one, times three where something learns."""
    config = base_config()
    config.model.update(layers=("sliding", "csa", "hca"), repeats=2, hidden=24, ffn_width=40, tied_head=tied)
    config.attention.update(window=8, hca_ratio=16, csa_ratio=4, top_k=3, heads=4, head_width=10, rope_width=4)
    config.attention.update(csa_stage=stage, indexer_loss_weight=weight)
    config.attention.update(q_rank=6, out_groups=2, out_rank=5, index_heads=3, index_head_width=8)
    spec, state = shapes(config)
    S, E, F, D, H = 50, 24, 40, 10, 4
    projections = E * 6 + 6 * H * D + E * D + H * D * 5 + 2 * 5 * E + 3 * E * F
    products = {"sliding": projections, "csa": projections + 4 * E * D, "hca": projections + 2 * E * D}
    forward = 0
    for kind in spec.layers:
        seen = oracles.visible(spec.attention.visibility(kind), np.zeros(S)).sum(axis=-1)
        local = np.minimum(np.arange(S) + 1, 8)
        if kind == "csa":
            seen = local + np.minimum(seen - local, 3 if stage == "sparse" else S)
            taught = H * D * (seen - local).sum() if weight and stage != "dense" else 0
        forward += 2 * products[kind] * S + 2 * 2 * H * D * seen.sum()
    indexer = 6 * 3 * 8 + 4 * E * 8 + E * 3
    scored = sum((t + 1) // 4 for t in range(S)) * 3 * 8
    passes = 3 if stage != "warmup" else 1
    index_passes = {"dense": 0, "warmup": 3, "sparse": 3 if weight else 1}[stage]
    whole = passes * 2 * (forward + 257 * E * S) + 2 * 2 * (index_passes * (indexer * S + scored) + taught)
    assert flops.per_token(spec, S, state.params) == pytest.approx(whole / S, rel=1e-12)


def test_utilisation_is_told_for_chips_that_are_known(monkeypatch):
    assert flops.utilisation(1e12) == {}
    monkeypatch.setattr(chips, "of_device", lambda kind: chips.CHIPS["TPU v5"] if kind == "cpu" else None)
    assert flops.utilisation(459e12 / 4) == {"mfu": 0.25}


def test_trace_of_the_steps_after_warming_up(tmp_path):
    config = tiny.get_config()
    config.train.update(steps=4, eval_every=0)
    config.profile.steps = 2
    config.run.update(root=str(tmp_path), id="run")
    summary = run.run(config, {}, rich.console.Console(quiet=True))
    folder = tmp_path / "run" / profile.FOLDER
    (trace,) = folder.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "train"]
    assert sorted(map(int, steps)) == [3, 4]
    assert any(folder.rglob("*.xplane.pb"))
    assert gzip.decompress((folder / "memory.prof").read_bytes())
    assert summary["peak_host_bytes"] > 2**26
    assert summary["flops_per_token"] > 6 * 257 * 32
    assert "mfu" not in summary


def test_trace_cut_short_is_written(tmp_path):
    with pytest.raises(ZeroDivisionError), profile.Profiler(tmp_path, 3, 2) as profiler:
        with profiler.step(2):
            pass
        assert not list(tmp_path.iterdir())
        with profiler.step(3):
            raise ZeroDivisionError
    assert list(tmp_path.rglob("*.xplane.pb"))
    with profile.Profiler(tmp_path / "none", 1, 0) as profiler, profiler.step(1):
        pass
    assert not (tmp_path / "none").exists()


def show(config):
    console = rich.console.Console(record=True, width=120, file=io.StringIO())
    dry_run.dry_run(config, console)
    return console.export_text()


def test_dry_run_tells_everything_runs_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("runs a program")

    monkeypatch.setattr(jax.stages.Compiled, "__call__", refuse)
    config = tiny.get_config()
    config.model.hidden = 512  # so that tenths of a MiB tell its parts apart
    config.run.root = str(tmp_path)
    shown = show(config)
    assert not list(tmp_path.iterdir())
    _, state = shapes(config)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    for told in (
        "  checkpoint_every: 5\n",  # the resolved config
        "backend=dot_product, accumulation_dtype=float32",
        "embed/embeddings",
        f"{parameters:,}",
        "batch: int32 [2, 64] over 1 devices",
    ):
        assert told in shown
    lines = [re.split(r"  +", line.strip()) for line in shown.split("memory of a device")[1].splitlines()]
    sizes = {line[0]: line[1] for line in lines if len(line) == 2}
    assert sizes["parameters"] == f"{parameters * 4 / 2**20:,.1f}"
    moments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state))
    assert sizes["optimizer"] == f"{moments / 2**20:,.1f}"
    assert float(sizes["in all"]) > float(sizes["temporaries"]) > 0


def test_dry_run_tells_what_is_learned(tmp_path):
    config = tiny.get_config()
    for name, text in {"a": b"one text", "b": b"one text\n", "c": b"another", "d": b"\0"}.items():
        (tmp_path / name).write_bytes(text)
    config.data.path, config.data.validation_fraction = str(tmp_path), 0.7
    shown = show(config)
    assert "duplicate documents 1, binary files left out 1; batch" in shown
    config = tiny.get_config()
    config.data.task, config.data.pairs = "recall", 3
    assert "data: recall, pairs 3; batch: int32 [2, 64]" in show(config)


def test_dry_run_refuses_what_cannot_run():
    config = tiny.get_config()
    config.data.path = "/nothing/there"
    with pytest.raises(ConfigError, match=r"config.data.path='/nothing/there': does not exist"):
        show(config)
