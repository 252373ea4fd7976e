"""What a run tells of its cost: FLOPs, a trace, memory, and all of it without training."""

import gzip
import io
import json
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from research import hardware
from research.attention.indexer import scores as index_scores
from research.attention.spec import Spec
from research.errors import ConfigError
from research.settings.config import base_config, read
from research.training import dry_run, flops, loop, optimizer, profile, run
from research.training import step as step_lib
from tests import oracles, tiny


def shapes(config):
    spec = Spec.make(read(config))
    return spec, jax.eval_shape(lambda: step_lib.init(spec, optimizer.build(Spec.make(read(config))), 0))


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
    S, E, F, D, H = 50, 24, 40, 10, 4
    config.data.seq_len = S
    spec, state = shapes(config)
    projections = E * 6 + 6 * H * D + E * D + H * D * 5 + 2 * 5 * E + 3 * E * F
    products = {"sliding": projections, "csa": projections + 4 * E * D, "hca": projections + 2 * E * D}
    forward = 0
    for kind in config.model.layers:
        seen = oracles.visible(spec.attend(kind).visibility, np.zeros(S)).sum(axis=-1)
        local = np.minimum(np.arange(S) + 1, 8)
        if kind == "csa":
            seen = local + np.minimum(seen - local, 3 if stage == "sparse" else S)
            attended = (seen - local).sum()
        forward += 2 * products[kind] * S + 2 * 2 * H * D * seen.sum()
    indexer = 6 * 3 * 8 + 4 * E * 8 + E * 3
    scored = sum((t + 1) // 4 for t in range(S))
    passes = 3 if stage != "warmup" else 1
    index_passes = {"dense": 0, "warmup": 3, "sparse": 3 if weight else 1}[stage]
    learns = index_passes == 3
    scores = (scored * (index_passes > 0) + 2 * attended * learns) * 3 * 8
    taught = H * D * attended * learns
    whole = passes * 2 * (forward + 257 * E * S) + 2 * 2 * (index_passes * indexer * S + scores + taught)
    assert flops.per_token(spec, state.params) == pytest.approx(whole / S, rel=1e-12)


@pytest.mark.parametrize(("seq_len", "expected"), [(16_384, 7.7e5), (131_072, 4.454e6)])
def test_the_sparse_loss_scores_what_is_selected(seq_len, expected):
    """By closed formula: over c complete entries, forward for all, and two products backward for `top_k` of them.

    A layer's loss adds, beside the backward pass of the indexer's matrices, those two and the teacher's product.
    """
    config = base_config()
    config.model.layers, config.attention.top_k, config.data.seq_len = ("csa",), 512, seq_len
    attention, width = config.attention, 2 * 4 * 32
    complete, all_selected = seq_len // 4, attention.top_k
    pairs = sum(range(complete + 1)) * 4 - 3 * complete  # the last token of a window is the first to see its entry
    selected = sum(range(all_selected)) * 4 + (seq_len + 1 - 4 * all_selected) * all_selected
    scoring = width * (pairs + 2 * selected) / seq_len
    assert scoring == pytest.approx(expected, rel=1e-3)

    found = {}
    for weight in (0.0, 1.0):
        config.attention.indexer_loss_weight = weight
        spec, state = shapes(config)
        found[weight] = flops.per_token(spec, state.params)
    modules = hk.data_structures.traverse(state.params)
    matrices = sum(
        x.size for module, name, x in modules if "indexer" in module and name not in ("scale", "position_bias")
    )
    teacher = 2 * selected / seq_len * attention.heads * attention.head_width
    added = 2 * width * selected / seq_len + teacher + 2 * 2 * matrices
    assert found[1.0] - found[0.0] == pytest.approx(added, rel=1e-9)
    # Without the loss, scores are computed once: for the rest of the model's cost the closed formula says nothing.
    config.attention.csa_stage = "dense"
    config.attention.indexer_loss_weight = 1.0
    spec, state = shapes(config)
    all_attended = flops.per_token(spec, state.params)
    dense = 12 * attention.heads * attention.head_width * (pairs - selected) / seq_len
    assert found[0.0] - (all_attended - dense) == pytest.approx(width * pairs / seq_len + 2 * matrices, rel=1e-9)


def test_scores_cost_what_the_compiler_counts():
    """What one more channel of an index head adds, by XLA's own account: for C entries forward, for K both passes."""
    queries, heads, entries, selected = 8, 2, 64, 16

    def products(program, count):
        def counted(width):
            q, keys, weights = (
                jnp.ones((1, queries, heads, width)),
                jnp.ones((1, count, width)),
                jnp.ones((1, queries, 2)),
            )
            compiled = jax.jit(program).lower(index_scores.Index(q, keys, weights)).compile()
            return compiled.cost_analysis()["flops"]

        return (counted(48) - counted(16)) / 32

    def scores(index):
        return index_scores.index_scores(index, index_scores.Scoring(heads_at_once=heads))

    forward = products(scores, entries)
    assert forward == pytest.approx(2 * queries * heads * entries, rel=0.02)
    both = products(jax.value_and_grad(lambda index: (scores(index) ** 2).sum()), selected)
    backward = both - products(scores, selected)
    assert backward == pytest.approx(2 * 2 * queries * heads * selected, rel=0.05)


def test_utilisation_is_told_for_chips_that_are_known(monkeypatch):
    assert flops.utilisation(1e12) == {}
    monkeypatch.setattr(hardware, "find_chip", lambda kind: hardware.CHIPS["TPU v5"] if kind == "cpu" else None)
    assert flops.utilisation(459e12 / 4) == {"mfu": 0.25}


@pytest.mark.parametrize("known", [slice(5, None), slice(None, 5)], ids=["ended on a known chip", "begun on one"])
def test_a_run_on_chips_of_which_only_one_is_known(known):
    rows = [{"step": i, "loss": 1.0, "step_seconds": 2.0, "tokens_per_second": 3.0} for i in range(1, 9)]
    rows[-1]["val_loss"] = 0.5
    for row in rows[known]:
        row["mfu"] = 0.25
    told = {"steps": 8, "final_loss": 1.0, "val_loss": 0.5, "step_seconds": 2.0, "tokens_per_second": 3.0, "mfu": 0.25}
    assert loop._outcome(rows) == told
    for row in rows:
        row.pop("mfu", None)
    assert "mfu" not in loop._outcome(rows)


@pytest.mark.slow
def test_trace_of_the_steps_after_warming_up(tmp_path):
    config = tiny.get_config()
    config.train.update(steps=4, eval_every=0)
    config.profile.steps = 2
    config.run.update(root=str(tmp_path), id="run")
    summary = run.run(read(config), {}, rich.console.Console(quiet=True))
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
    dry_run.dry_run(read(config), console)
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
    # A dense model's validation: parameters and the optimizer's state stay, and temporaries come.
    resident = (parameters * 4 + moments) / 2**20
    assert float(sizes["temporaries of validation"]) > 0
    expected = resident + float(sizes["temporaries of validation"])
    assert float(sizes["in all, validating"]) == pytest.approx(expected, abs=0.2)


@pytest.mark.slow
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
