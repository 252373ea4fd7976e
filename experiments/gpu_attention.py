"""What do flash kernels gain on a GPU over loops of small products and over dense attention, and how do they grow?

    python launch/aot.py --config=experiments/gpu_attention.py      # compiled, without a GPU; half an hour, resumable
    python launch/bench.py --config=experiments/gpu_attention.py    # timed, on a GPU

One attention, 8 heads of 64, window 128, bfloat16, forward and backward, for an H100 and an A100: `dot_product`,
`blockwise` and every kernel of `joined`, for the three kinds, from 8,192 tokens to 65,536; CSA by both schedules; HCA's
blocks; and DeepSeek-V4-Flash's 64 heads of 512. The last lines tell kernels, loop trips, temporaries and their growth.
"""

import math

import ml_collections

from research.attention.backends import joined
from research.settings.config import base_config
from research.sweeps import cross, experiment

ARGS = ("", "demo")
HEADLINE = ("compile_seconds", "temp_bytes")
_KERNELS = {"h100:1": ("mosaic", "triton", "xla"), "a100:1": ("triton", "xla")}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """'' reaches 65,536 tokens, 'demo' stops at 2,048."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.model.dtype = "bfloat16"
    config.model.layers = ("hca",)
    config.attention.heads = 8
    config.attention.top_k = 512
    config.attention.backend = "joined"
    config.data.batch_size = 1
    config.data.seq_len = 1024 if arg == "demo" else 8192
    config.aot.topology = "h100:1"
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """Kinds, backends and kernels at two lengths; schedules, blocks and wide heads; then the cross, small."""
    experiment.check_arg(arg, ARGS)
    lengths = (1024, 2048) if arg == "demo" else (8192, 65536)
    points = []
    for topology, kernels in _KERNELS.items():
        for kind in ("sliding", "hca", "csa"):
            on = {"aot.topology": topology, "model.layers": (kind,)}
            points += [
                on | {"attention.backend": name, "data.seq_len": lengths[0]} for name in ("dot_product", "blockwise")
            ]
            ways = [{"attention.csa_schedule": way} for way in joined.SCHEDULES] if kind == "csa" else [{}]
            points += [
                on | way | {"attention.flash_kernel": name, "data.seq_len": n}
                for way in ways
                for name in kernels
                for n in lengths
                if (name, way.get("attention.csa_schedule")) != ("mosaic", "gather")  # which it refuses
            ]
    points += [{"model.layers": ("hca",), "attention.block_q": size} for size in (256, 512)]
    if arg != "demo":
        wide = {"attention.heads": 64, "attention.head_width": 512, "data.seq_len": lengths[1]}
        points += [wide | {"model.layers": (kind,), "aot.topology": t} for kind in ("hca", "csa") for t in _KERNELS]
    small = [{"model.layers": ("hca",), "data.seq_len": 512}]
    return points + cross.points(get_config(arg), small, (128, 256))


def report(rows: list[dict]) -> list[str]:
    """What the joined kernels launch and take beside the others, and how that grows."""
    found = {}
    for row in rows:
        if row["status"] == "ok" and row["phase"] == "forward_backward" and row["requested"]["block_q"] == 0:
            name = row["effective"].get("flash_kernel", row["backend"])
            way = row["effective"].get("schedule", "")
            found.setdefault((row["chip"], row["visibility"], row["head_width"], name, way), {})[row["seq_len"]] = row
    lines = []
    for (chip, kind, width, name, way), by_length in found.items():
        for seq_len, row in by_length.items():
            trips = f"{row['loop_trips']:,} loop trips" + (" and more" if row["unknown_loops"] else "")
            lines.append(
                f"{chip} {' '.join(filter(None, (kind, name, way)))}, heads of {width}, at {seq_len:,}: "
                f"{row['kernels']:,} kernels, {trips}, {row['temp_bytes'] / 1e6:,.0f} MB of temporaries"
            )
        if len(by_length) > 1:
            (first, a), *_, (last, b) = sorted(by_length.items())
            growth = math.log(b["temp_bytes"] / a["temp_bytes"], last / first)
            lines[-1] += f", which grow as the length ^{growth:.2f}"
    return lines


REPORTS = {"aot": report}
