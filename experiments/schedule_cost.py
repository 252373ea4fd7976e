"""What does it take to build a schedule, block by block or in closed form?

    python launch/masks.py --config=experiments/schedule_cost.py

HCA's forward and backward schedules at 16,384 to 131,072 tokens, blocks of 512 and 1,024, evaluated block by block by
tokamax (`static`) and from interval arithmetic (`closed_form`); a runtime mask (`dynamic`) at the shortest, where it is
the program that builds it; and a million tokens in closed form. About two minutes on two cores; the last lines are the
ratios. `:quick` stops at 4,096 tokens.
"""

import ml_collections

from research.settings.config import base_config
from research.sweeps import experiment

ARGS = ("", "quick")
HEADLINE = ("compile_seconds", "temp_bytes")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """HCA as in DeepSeek-V4: window 128, ratio 128."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.model.layers = ("hca",)
    config.attention.backend = "splash"
    config.data.seq_len = 2048 if arg == "quick" else 16384
    config.data.batch_size = 1
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """Lengths x blocks x schedules, and both ways to reduce dq where the schedule leaves a choice."""
    experiment.check_arg(arg, ARGS)
    quick = arg == "quick"
    lengths, blocks = ((2048, 4096), (128, 256)) if quick else ((16384, 65536, 131072), (512, 1024))
    longest = 8192 if quick else 1_048_576

    def point(seq_len: int, block: int, schedule: str, steps: int = 3) -> experiment.Overrides:
        return {
            "data.seq_len": seq_len,
            "attention.block_q": block,
            "attention.block_kv": block,
            "attention.schedule": schedule,
            "attention.dq_reduction_steps": steps,
        }

    points = [point(s, b, name) for s in lengths for b in blocks for name in ("closed_form", "static")]
    points += [point(lengths[0], b, "closed_form", 0) for b in blocks]
    points += [point(lengths[0], b, "dynamic", 0) for b in blocks]
    return points + [point(longest, b, "closed_form") for b in blocks]


def report_masks(rows: list[dict]) -> list[str]:
    """How much longer the evaluation of every block takes, with the partial blocks and without."""
    by_place = {}
    for row in rows:
        if row["dq_reduction_steps"] == 3:
            by_place.setdefault((row["seq_len"], row["block_q"]), {})[row["schedule"]] = row
    lines = []
    for (seq_len, block), found in by_place.items():
        if {"static", "closed_form"} <= found.keys():
            static, ours = found["static"]["build_seconds"], found["closed_form"]
            whole, lists = static / ours["build_seconds"], static / ours["schedule_seconds"]
            lines.append(
                f"{seq_len:,} tokens, blocks of {block}: static takes {whole:,.0f}x the time of closed_form, "
                f"{lists:,.0f}x that of its lists of blocks alone"
            )
    return lines
