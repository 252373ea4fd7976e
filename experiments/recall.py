"""Which kinds of attention find what was said far beyond the window?

    python launch/sweep.py --config=experiments/recall.py:demo
    python analysis/recall.py runs/recall-demo/results.jsonl

Small models answer what was said before, at a distance that is known (`research.data.recall`). A needle, one pair of
key and value in noise, asks how far a model reaches: sliding layers carry nothing further than their number times
(window - 1), and `check` holds them to that, since beyond it they can only guess, one answer in 16. Recall, six pairs
whose keys are asked for, also asks which value belongs to which key. Full attention is a sliding window as long as the
row. CSA attends to 4 of up to 16 entries, those that its indexer picks, and once more to all of them.

`:demo`, on 2 cores of an x86 machine, Python 3.11, 2026-11-30, 16 minutes with `--parallel=2`, shares of right
answers at distances 4 to 7, 8 to 15, 16 to 31, 32 to 61. Needle: sliding 0.98, 0.81, 0.07, 0.08; HCA, CSA, the three
interleaved and full attention 1.00 throughout. Recall after 1,000 steps: sliding 0.06, 0.05, 0.06, 0.06; HCA 0.75,
0.66, 0.63, 0.53; CSA 0.30, 0.29, 0.27, 0.24, with all entries 0.91, 0.90, 0.90, 0.85; full attention 0.47, 0.47, 0.31,
0.26. LOG.md says what is known of why.

The last points take a few steps on longer rows: what the mask strategies cost on this task.
"""

import pathlib

import ml_collections

from analysis.recall import trained
from research.data.recall import CHANCE
from research.runs import files
from research.runs.folder import CONFIG
from research.settings.config import base_config
from research.sweeps import cross, experiment
from research.training import accuracy

ARGS = ("", "demo")
HEADLINE = ("val_accuracy", "val_loss", "step_seconds")

_PATTERNS = (("sliding", "sliding"), ("hca", "hca"), ("csa", "csa"), ("sliding", "csa", "hca"))
_RECALL = {"data.task": "recall", "data.pairs": 6, "data.batch_size": 32}
_BRIEF = {"model.layers": ("hca", "hca"), "train.steps": 6, "optimizer.warmup_steps": 5, "data.batch_size": 2}
_TOLERANCE = 0.05  # over chance, of a share of some hundred answers


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """'' is sized for an accelerator with 16 GiB and up, 'demo' for two CPU cores."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.data.task = "needle"
    config.model.layers = _PATTERNS[0]
    config.optimizer.warmup_steps = 50
    config.optimizer.learning_rate = 1e-3
    config.train.eval_batches = 32
    config.train.log_every = 50
    if arg == "demo":
        config.model.hidden = 64
        config.model.ffn_width = 128
        config.attention.window = 8
        config.attention.hca_ratio = 8
        config.attention.top_k = 4
        config.attention.heads = 2
        config.attention.head_width = 32
        config.attention.rope_width = 8
        config.attention.out_groups = 1
        config.attention.out_rank = 64
        config.attention.index_heads = 1
        config.attention.index_head_width = 8
        config.data.seq_len = 64
        config.data.batch_size = 64
        config.train.steps = 600
        config.train.eval_every = 200
        config.train.checkpoint_every = 200
    else:
        config.model.hidden = 256
        config.model.ffn_width = 512
        config.attention.heads = 4
        config.attention.top_k = 64
        config.attention.q_rank = 256
        config.attention.out_rank = 128
        config.data.seq_len = 2048
        config.data.batch_size = 32
        config.train.steps = 10_000
        config.train.eval_every = 500
        config.train.checkpoint_every = 1000
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """Every pattern on both tasks, full attention among them, under the default backend; then the cross, briefly."""
    experiment.check_arg(arg, ARGS)
    local = arg == "demo"
    seq_len = get_config(arg).data.seq_len
    full = {"model.layers": ("sliding", "sliding"), "attention.window": seq_len}
    every_entry = {"model.layers": ("csa", "csa"), "attention.top_k": seq_len // 4}
    patterns = [*({"model.layers": layers} for layers in _PATTERNS), full, every_entry]
    recall = _RECALL | ({"optimizer.learning_rate": 3e-3, "train.steps": 1000} if local else {})
    question = [*patterns, *(recall | pattern for pattern in patterns)]
    brief, sizes = _BRIEF | {"data.seq_len": 512 if local else seq_len}, (128, 256) if local else (256, 512)
    return question + cross.points(get_config(arg), [brief], sizes, ("static", "dynamic"), unscheduled=True)


def check(rows: list[experiment.Row]) -> list[str]:
    """The accuracy of each pattern by distance.

    Raises:
      CheckError: a sliding pattern answers better than by chance where none of its layers carries the value.
    """
    lines, failed = [], []
    for row in trained(rows):
        shares = accuracy.shares(row)
        lines.append(f"{row['point']}: " + ", ".join(f"{a} to {z} {share:.2f}" for (a, z), share in shares.items()))
        config = files.read_json(pathlib.Path(row["folder"]) / CONFIG)
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
