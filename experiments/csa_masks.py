"""What does CSA's choice of entries cost as a mask, and how should the kernel be told of it?

    python launch/aot.py --config=experiments/csa_masks.py              # for a TPU, without one
    python launch/bench.py --config=experiments/csa_masks.py:demo       # on two CPU cores, splash interpreted

One CSA attention: `dynamic`, which holds a mask of [S, S + C] and sorts its blocks at run time; `hybrid`, whose blocks
of local keys are in closed form and whose mask is one of entries alone; and `blockwise`. Crossed with block sizes,
dq_reduction_steps and the number of selected entries. The last lines set `dynamic` beside `hybrid`.
"""

import ml_collections

from experiments import seed_claims
from research.attention.backends import blockwise
from research.sweeps import cross, experiment

ARGS = ("", "demo")
HEADLINE = ("seconds", "temp_bytes", "compile_seconds")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """'' has the sizes of DeepSeek-V4-Flash at 16,384 tokens, 'demo' fits two CPU cores."""
    experiment.check_arg(arg, ARGS)
    config = seed_claims.get_config()
    config.model.layers = ("csa",)
    config.data.seq_len = 16384
    if arg == "demo":
        config.model.dtype = "float32"
        config.attention.heads = config.attention.out_groups = 2
        config.attention.head_width = 64
        config.attention.rope_width = 16
        config.data.seq_len = 512
        config.bench.repeats = 1
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """The question is the cross itself, x top_k; then `blockwise`, and the dense stage's schedules beside them."""
    experiment.check_arg(arg, ARGS)
    sizes, choices = ((128, 256), (16, 64)) if arg == "demo" else ((256, 512, 1024), (512, 2048))
    config, chosen = get_config(arg), [{"attention.top_k": top_k} for top_k in choices]
    points = cross.points(config, chosen, sizes, fewest_blocks=1)
    points += [
        {
            "attention.backend": "blockwise",
            "attention.dq_reduction_steps": 0,
            "attention.csa_schedule": way,
            "attention.top_k": top_k,
        }
        for top_k in choices
        for way in blockwise.SCHEDULES
    ]
    # All entries attended, as in the dense stage, whose mask is known beforehand.
    dense = {"model.layers": ("hca",), "attention.hca_ratio": 4}
    return points + cross.points(config, [dense], sizes[:1], ("static", "dynamic"), steps=(0,))


def report(rows: list[experiment.Row]) -> list[str]:
    """What `dynamic` takes of `hybrid`, by block size and top_k: temporaries, and the time to compile."""
    found = {}
    for row in rows:
        if row["phase"] == "forward_backward" and row["status"] == "ok" and row["visibility"] == "csa":
            effective = row.get("effective", {})
            key = effective.get("block_q"), row["overrides"].get("attention.top_k")
            found.setdefault(key, {})[row["schedule"], effective.get("dq_reduction_steps")] = row
    lines = []
    for (block, top_k), ways in found.items():
        dynamic, hybrid = ways.get(("dynamic", 3)), ways.get(("hybrid", 3))
        if dynamic and hybrid:
            temp, seconds = (dynamic[name] / hybrid[name] for name in ("temp_bytes", "compile_seconds"))
            line = f"block {block}, top-{top_k}: dynamic takes {temp:.2f}x the temporaries of hybrid"
            lines.append(f"{line} and {seconds:.2f}x its time to compile")
    return lines


REPORTS = {"bench": report, "aot": report}
