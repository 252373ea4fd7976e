"""What do mask strategy, block sizes and dq_reduction_steps cost, when the loss is the same?

    python launch/sweep.py --config=experiments/mask_strategies.py:demo

One language model per point: attention kind x backend x schedule x block size x dq_reduction_steps. All points of a
kind compute the same function, so their loss curves must agree; `check` holds them to it. What differs is step time,
compile time and temporary memory. On a CPU the splash kernels are interpreted: there, compare memory and losses, not
step times.

`:demo`, on 2 cores of an x86 machine that was busy with other work, Python 3.11, 2026-12-01: 19 points, 15 minutes of
processor time, set-up included. The loss curves of a kind differ by 1e-6 nats at most. Temporaries of an HCA model,
MiB: dot_product 11.8, splash 9.9 to 10.5, blockwise 6.0. At 512 tokens that is all; what grows with the sequence shows
ahead of time for a TPU.
"""

import pathlib

import ml_collections

from research.runs import files
from research.runs.folder import CONFIG, read_rows
from research.settings.config import base_config
from research.sweeps import cross, experiment

ARGS = ("", "demo")
HEADLINE = ("step_seconds", "compile_seconds", "temp_bytes")

_KINDS = ("sliding", "hca", "csa")
# Largest difference in loss, in nats, between the points of a kind. Rounding to bfloat16 alone makes 1e-3 in 12 steps.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """'' is sized for an accelerator with 16 GiB and up, 'demo' for two CPU cores."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.train.log_every = 1
    if arg == "demo":
        config.model.hidden = 64
        config.model.ffn_width = 128
        config.attention.heads = 2
        config.attention.top_k = 16
        config.data.seq_len = 512
        config.data.batch_size = 1
        config.train.steps = 6
        config.train.eval_batches = 1
        config.optimizer.warmup_steps = 2
    else:
        config.model.repeats = 8
        config.model.hidden = 1024
        config.model.ffn_width = 2752
        config.model.dtype = "bfloat16"
        config.model.remat = "block"
        config.attention.heads = 16
        config.attention.head_width = 128
        config.attention.rope_width = 64
        config.attention.q_rank = 512
        config.attention.out_groups = 4
        config.attention.out_rank = 256
        config.attention.index_heads = 16
        config.attention.index_head_width = 128
        config.attention.top_k = 512
        config.data.seq_len = 8192
        config.data.batch_size = 1
        config.train.steps = 100
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """The question is the cross itself, for every kind of layer, dense and blockwise attention before it.

    The demo leaves out the schedules of sliding layers: HCA's local part is all of them.
    """
    experiment.check_arg(arg, ARGS)
    kinds = [{"model.layers": (kind,)} for kind in _KINDS]
    if arg != "demo":
        return cross.points(get_config(arg), kinds, (512, 1024), unscheduled=True)
    sliding, *others = kinds
    names = ("closed_form", "static", "dynamic", "hybrid")
    crossed = cross.points(get_config(arg), others, (128, 256), names, unscheduled=True)
    return [*cross.points(get_config(arg), [sliding], (), unscheduled=True), *crossed]


def check(rows: list[experiment.Row]) -> list[str]:
    """The largest difference in loss at any step between the points of each kind.

    Raises:
      CheckError: a difference exceeds the tolerance.
    """
    lines, failed = [], False
    for kind in _KINDS:
        folders = [pathlib.Path(row["folder"]) for row in rows if [*row["layers"]] == [kind] and row["status"] == "ok"]
        if len(folders) > 1:
            curves = [[entry["loss"] for entry in read_rows(folder)] for folder in folders]
            spread = max(max(losses) - min(losses) for losses in zip(*curves, strict=True))
            allowed = _TOLERANCE[files.read_json(folders[0] / CONFIG)["model"]["dtype"]]
            failed |= not spread <= allowed
            lines.append(
                f"{kind}: {len(curves)} loss curves differ by {spread:.1e} nats at most, {allowed:.0e} allowed"
            )
    if failed:
        raise experiment.CheckError("; ".join(lines))
    return lines
