"""Which kinds of attention find what was said far beyond the window?

    python launch/sweep.py --config=experiments/recall.py:runlocal
    python analysis/recall.py runs/recall-runlocal/results.jsonl

Small models learn multi-query associative recall (`research.data.recall`): pairs of key and value amid blanks, asked
for at a distance that is known. Sliding layers carry nothing further than their number times (window - 1), and `check`
holds them to that: beyond it they must guess, one answer in 16. Entries reach any distance, if what they pool still
tells which value belongs to which key. Full attention is a sliding window as long as the row. CSA sees all of its
entries here: which ones its indexer would choose is another question.

RESULTS

The last points run for a few steps of longer rows: the mask strategies on this task, whose losses must agree.
"""

import pathlib

import ml_collections

from experiments import mask_strategies
from research import experiment, tracking
from research.config import base_config
from research.data.recall import CHANCE
from research.training import accuracy

ARGS = ("", "runlocal")
HEADLINE = ("val_accuracy", "val_loss", "step_seconds")

_PATTERNS = (("sliding", "sliding"), ("hca", "hca"), ("csa", "csa"), ("csa", "hca"))
_FULL = ("sliding", "sliding")
_BRIEF = {
    "model.layers": ("hca", "hca"),
    "train.steps": 6,
    "optimizer.warmup_steps": 5,
    "data.seq_len": 512,
    "data.batch_size": 2,
}
_TOLERANCE = 0.05  # over chance, of a share of some thousand answers


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """'' is sized for an accelerator with 16 GiB and up, 'runlocal' for two CPU cores."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.data.task = "recall"
    config.model.layers = _PATTERNS[0]
    config.optimizer.warmup_steps = 50
    config.train.eval_batches = 16
    config.train.log_every = 50
    if arg == "runlocal":
        config.model.hidden = 64
        config.model.ffn_width = 128
        config.attention.window = 8
        config.attention.hca_ratio = 8
        config.attention.top_k = 128
        config.attention.heads = 2
        config.attention.head_width = 32
        config.attention.rope_width = 8
        config.attention.out_groups = 1
        config.attention.out_rank = 64
        config.attention.index_heads = 1
        config.attention.index_head_width = 8
        config.data.seq_len = 64
        config.data.batch_size = 32
        config.data.pairs = 6
        config.train.steps = 1200
        config.train.eval_every = 200
        config.train.checkpoint_every = 400
    else:
        config.model.hidden = 256
        config.model.ffn_width = 512
        config.attention.heads = 4
        config.attention.top_k = 512
        config.attention.q_rank = 256
        config.attention.out_rank = 128
        config.data.seq_len = 2048
        config.data.batch_size = 32
        config.data.pairs = 16
        config.train.steps = 10_000
        config.train.eval_every = 500
        config.train.checkpoint_every = 1000
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """The patterns and full attention under the default backend, then the mask strategies, briefly."""
    experiment.check_arg(arg, ARGS)
    local = arg == "runlocal"
    points = [{"model.layers": layers} for layers in _PATTERNS]
    points.append({"model.layers": _FULL, "attention.window": get_config(arg).data.seq_len})
    brief = _BRIEF if local else _BRIEF | {"data.seq_len": 2048}
    sizes = (128, 256) if local else (256, 512)
    for strategy in mask_strategies.strategies(
        brief["model.layers"], ("static", "dynamic"), sizes, brief["data.seq_len"]
    ):
        points.append(brief | strategy)
    return points


def check(rows: list[experiment.Row]) -> list[str]:
    """The accuracy of each pattern by distance.

    Raises:
      CheckError: a sliding pattern answers better than by chance where none of its layers carries the value.
    """
    lines, failed = [], []
    for row in rows:
        if row["status"] != "ok" or "train.steps" in row["overrides"]:
            continue
        shares = accuracy.shares(row)
        lines.append(f"{row['point']}: " + ", ".join(f"{a} to {z} {share:.2f}" for (a, z), share in shares.items()))
        config = tracking.read_json(pathlib.Path(row["folder"]) / tracking.CONFIG)
        reach = len(row["layers"]) * config["model"]["repeats"] * (config["attention"]["window"] - 1)
        if set(row["layers"]) == {"sliding"}:
            beyond = [share for (first, _), share in shares.items() if first > reach]
            failed += [
                f"{row['point']} answers {share:.2f} beyond {reach} tokens"
                for share in beyond
                if share > CHANCE + _TOLERANCE
            ]
    if failed:
        raise experiment.CheckError("; ".join([*lines, *failed]))
    return lines
