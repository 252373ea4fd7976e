"""What does the ring buffer for dq save, and is what it costs in precision its own or the dtype's?

    python launch/bench.py --config=experiments/dq_reduction.py:demo

One HCA attention with dq_reduction_steps 0 and 3, crossed with what confounds the comparison. The kernel keeps partial
sums in q's dtype under 3, and under 0 up to four key steps, but in float32 beyond: so dtype (float32, bfloat16) and
number of key steps (few, many) vary too, and rows record the dtype and number of partial sums in effect, under both
block sizes and every schedule that leaves the choice. A runtime mask leaves none and stands beside them once.
"""

import ml_collections

from research.settings.config import base_config
from research.sweeps import cross, experiment

ARGS = ("", "demo")
HEADLINE = ("seconds", "temp_bytes")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """'' is sized for an accelerator with 16 GiB and up, 'demo' for two CPU cores and about five minutes."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.model.layers = ("hca",)
    config.attention.backend = "splash"
    config.data.batch_size = 1
    if arg == "demo":
        config.attention.heads = 2
        config.bench.repeats = 1
    else:
        config.attention.heads = 16
        config.attention.head_width = 128
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """The question is the cross itself, with few key steps and many, under both dtypes."""
    experiment.check_arg(arg, ARGS)
    demo = arg == "demo"
    sizes, lengths = ((128, 256), (256, 768)) if demo else ((512, 1024), (1024, 16384))
    names = ("static", "dynamic") if demo else None
    cases = [{"data.seq_len": s, "model.dtype": dtype} for s in lengths for dtype in ("float32", "bfloat16")]
    return cross.points(get_config(arg), cases, sizes, names, fewest_blocks=1)
