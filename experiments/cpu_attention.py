"""What does linear-cost attention gain over the dense one on this machine, and how does it grow?

    python launch/bench.py --config=experiments/cpu_attention.py

One attention, 8 heads of 64, window 128, float32, forward and backward: `blockwise` against `dot_product` at 8,192
tokens for the three kinds, then HCA alone up to 131,072. The last lines are the ratios, all from this one run.
"""

import math

import ml_collections

from research.attention.backends import blockwise
from research.settings.config import base_config
from research.sweeps import cross, experiment

ARGS = ("", "demo")
HEADLINE = ("seconds", "temp_bytes")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """'' reaches 131,072 tokens and takes a quarter of an hour on two cores, 'demo' stops at 4,096."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.attention.heads = 8
    config.attention.top_k = 512
    config.data.batch_size = 1
    config.data.seq_len = 1024 if arg == "demo" else 8192
    config.bench.repeats = 3
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """Both backends for each kind, and for CSA both schedules; HCA's growth and blocks; then the cross, small."""
    experiment.check_arg(arg, ARGS)
    lengths = (1024, 2048, 4096) if arg == "demo" else (8192, 16384, 32768, 65536, 131072)
    points = [
        {"model.layers": (kind,), "attention.backend": backend, "data.seq_len": lengths[0]}
        for kind in ("hca", "csa", "sliding")
        for backend in ("blockwise", "dot_product")
    ]
    points += [
        {
            "model.layers": ("csa",),
            "attention.backend": "blockwise",
            "data.seq_len": seq_len,
            "attention.csa_schedule": way,
        }
        for seq_len in lengths[:2]
        for way in blockwise.SCHEDULES
    ]
    hca = {"model.layers": ("hca",), "attention.backend": "blockwise"}
    points += [hca | {"data.seq_len": seq_len} for seq_len in lengths[1:]]
    points += [hca | {"data.seq_len": lengths[0], "attention.block_q": size} for size in (16, 64, 128)]
    return points + cross.points(get_config(arg), [{"model.layers": ("hca",), "data.seq_len": 512}], (128, 256))


def report(rows: list[dict]) -> list[str]:
    """The ratios that answer the question, under the default blocks."""
    found, csa = {}, {}
    for row in rows:
        compared = row["phase"] == "forward_backward" and row["status"] == "ok" and row["backend"] != "splash"
        if compared and row["requested"]["block_q"] == 0:
            schedule = row["requested"]["csa_schedule" if row["visibility"] == "csa" else "schedule"]
            if schedule == "auto":
                found[row["visibility"], row["backend"], row["seq_len"]] = row
            else:
                csa.setdefault(row["seq_len"], {})[schedule] = row
    lines = [
        f"csa at {seq_len:,}: stream takes {_ratios(ways['stream'], ways['gather'])} of gather"
        for seq_len, ways in csa.items()
        if len(ways) == len(blockwise.SCHEDULES)
    ]
    for (kind, backend, seq_len), dense in found.items():
        ours = found.get((kind, "blockwise", seq_len))
        if backend == "dot_product" and ours:
            lines.append(f"{kind} at {seq_len:,}: dot_product takes {_ratios(dense, ours)} of blockwise")
    lengths = sorted(seq_len for kind, backend, seq_len in found if (kind, backend) == ("hca", "blockwise"))
    for seq_len in lengths[1:]:
        first, second = found["hca", "blockwise", lengths[0]], found["hca", "blockwise", seq_len]
        time, memory, useful = (
            math.log(second[name] / first[name], seq_len / lengths[0])
            for name in ("seconds", "temp_bytes", "useful_flops")
        )
        grown = f"hca {lengths[0]:,} to {seq_len:,}"
        lines.append(f"{grown}: time ^{time:.2f}, temporaries ^{memory:.2f}, visible pairs ^{useful:.2f}")
    for (kind, backend, seq_len), row in found.items():
        if backend == "blockwise":
            share = row["useful_flops_per_second"] / row["matmul_flops_per_second"]
            lines.append(
                f"{kind} at {seq_len:,}: useful FLOP/s are {share:.0%} of this machine's own product of matrices"
            )
    return lines


def _ratios(row: dict, other: dict) -> str:
    time, memory = (row[name] / other[name] for name in ("seconds", "temp_bytes"))
    return f"{time:.2f}x the time and {memory:.2f}x the temporaries"


REPORTS = {"bench": report}
