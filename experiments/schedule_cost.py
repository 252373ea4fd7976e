"""What does it take to build a schedule, block by block or in closed form?

    python launch/masks.py --config=experiments/schedule_cost.py

HCA's forward and backward schedules at 16,384 to 131,072 tokens, blocks of 512 and 1,024, evaluated block by block by
tokamax (`static`) and from interval arithmetic (`closed_form`); a runtime mask (`dynamic`) at the shortest, where it is
the program that builds it; and a million tokens in closed form. About two minutes on two cores; the last lines are the
ratios. `:demo` stops at 4,096 tokens.
"""

import ml_collections

from research.settings.config import base_config
from research.sweeps import cross, experiment

ARGS = ("", "demo")
HEADLINE = ("compile_seconds", "temp_bytes")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """HCA as in DeepSeek-V4: window 128, ratio 128."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.model.layers = ("hca",)
    config.attention.backend = "splash"
    config.data.seq_len = 2048 if arg == "demo" else 16384
    config.data.batch_size = 1
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """Both schedules at each length, the closed form at a longer one; then the cross, where it is short."""
    experiment.check_arg(arg, ARGS)
    demo = arg == "demo"
    lengths, blocks = ((2048, 4096), (128, 256)) if demo else ((16384, 65536, 131072), (512, 1024))
    longest = 8192 if demo else 1_048_576

    def at(lengths: tuple[int, ...], *names: str, steps: int) -> list[experiment.Overrides]:
        cases = [{"data.seq_len": seq_len} for seq_len in lengths]
        return cross.points(get_config(arg), cases, blocks, names, (steps,))

    question = at(lengths, "closed_form", "static", steps=3) + at((longest,), "closed_form", steps=3)
    return question + at(lengths[:1], "closed_form", "dynamic", steps=0)


def report(rows: list[dict]) -> list[str]:
    """How much longer the evaluation of every block takes, with the partial blocks and without."""
    by_place = {}
    for row in rows:
        if row.get("dq_reduction_steps") == 3:
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


REPORTS = {"masks": report}
