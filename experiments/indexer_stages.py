"""Does the indexer learn, in its warm-up, which entries the attention will look at?

    python launch/sweep.py --config=experiments/indexer_stages.py

CSA's three stages, each from the parameters and moments that the one before it left: attention to all entries; the same
with nothing but the indexer in training; attention to the selected entries, everything in training. `stages.png` shows
the losses, and the recall of the indexer's choice against the entries that the heads attend most. `check` holds the
warm-up to a recall above that of an untrained indexer and of a random choice.

The points after the first three run for a few steps of the dense stage only: what attending to everything costs under
a schedule that a selection rules out (`static`), beside one that it does not (`dynamic`). `:demo` has fewer steps.

On 2 cores of an x86-64 machine without accelerator, Python 3.11, 2026-11-29: 4.3 minutes of processor time, of them 1.3
for the stages. Recall 0.16 before the warm-up, 0.90 after it, 0.84 at the end, where a random choice has 0.18; it is at
0.81 after 40 of the 400 steps. Validation, bits per byte: 2.899 after the dense stage and, the model being
the same, after the warm-up; 2.579 after the sparse one. A warm-up step takes 0.37 of a dense one, its temporary memory
0.23: no gradient passes through the model.
"""

import pathlib

import ml_collections

from analysis import stages
from research.runs.folder import read_rows
from research.settings.attention import STAGES
from research.settings.config import base_config
from research.sweeps import cross, experiment
from research.training.run import FINISHED

ARGS = ("", "demo")
HEADLINE = ("val_bits_per_byte", "step_seconds", "temp_bytes")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Sized for two CPU cores."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    demo = arg == "demo"
    config.model.layers = ("sliding", "csa")
    config.model.hidden = 64
    config.model.ffn_width = 128
    config.attention.window = 32
    config.attention.heads = 2
    config.attention.head_width = 32
    config.attention.top_k = 8
    config.attention.index_head_width = 16
    config.data.batch_size = 2
    config.train.steps = 30 if demo else 400
    config.train.eval_every = 10 if demo else 40
    config.train.eval_batches = 2 if demo else 8
    config.optimizer.warmup_steps = 3
    return config


def sweep(arg: str = "") -> list[experiment.Overrides | experiment.Point]:
    """The stages, one after the other; then the cross that the dense one can have, briefly."""
    experiment.check_arg(arg, ARGS)
    points, before = [], ""
    for stage in STAGES:
        start = {"train.start_from": before} if before else {}
        points.append(experiment.Point({"attention.csa_stage": stage} | start, after=before or ()))
        before = points[-1].label
    brief = {"attention.csa_stage": "dense", "train.steps": 4, "train.eval_batches": 1}
    return points + cross.points(get_config(arg), [brief], (128, 256), ("static", "dynamic"))


def check(rows: list[experiment.Row]) -> list[str]:
    """The recall before and after the warm-up and at the end; draws `stages.png` beside the runs.

    Raises:
      CheckError: the warm-up did not raise the recall, or a random choice would do as well.
    """
    chain = [row for row in rows if "attention.backend" not in row["overrides"]]  # without those of the strategies
    if len(chain) < len(STAGES) or any(row["status"] != FINISHED for row in chain):
        return ["the stages did not all finish: no recall to compare"]
    dense, warmup, sparse = curves = [read_rows(pathlib.Path(row["folder"])) for row in chain]
    before, after, end = (stage[-1]["val_indexer_recall"] for stage in (dense, warmup, sparse))
    chance = warmup[-1]["val_indexer_useful"]
    line = f"recall {before:.2f} before the warm-up, {after:.2f} after it, {end:.2f} at the end; {chance:.2f} by chance"
    if not after > max(before, chance):
        raise experiment.CheckError(line)
    picture = pathlib.Path(chain[0]["folder"]).parent / "stages.png"
    stages.draw(dict(zip(STAGES, curves, strict=True)), picture)
    return [line, f"stages: {picture}"]
