"""Which block sizes suit which schedule, and does the answer depend on the dtype?

    python launch/bench.py --config=experiments/block_sizes.py:demo

One HCA attention under every schedule: queries per block x keys per block, in float32 and bfloat16, whose tiles of
memory differ, with the ring buffer on and off where the schedule leaves the choice. Rows record the sizes in effect,
forward and backward. `:demo` shows on two CPU cores, in about five minutes, that it all runs: the kernels are
interpreted, so only temporaries and blocks mean something there.
"""

import itertools

import ml_collections

from research.settings.config import base_config
from research.sweeps import cross, experiment

ARGS = ("", "demo")
HEADLINE = ("seconds", "temp_bytes", "compile_seconds")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """'' is sized for an accelerator with 16 GiB and up, 'demo' for two CPU cores."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.model.layers = ("hca",)
    config.data.batch_size = 1
    if arg == "demo":
        config.attention.heads = 2
        config.data.seq_len = 512
        config.bench.repeats = 1
    else:
        config.attention.heads = 16
        config.attention.head_width = 128
        config.data.seq_len = 16384
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """The question is the cross itself, with queries' and keys' blocks apart, under both dtypes."""
    experiment.check_arg(arg, ARGS)
    names, sizes = (("static", "dynamic"), (128, 256)) if arg == "demo" else (None, (256, 512, 1024))
    pairs = itertools.product(sizes, sizes)
    crossed = cross.points(get_config(arg), [{}], pairs, names, fewest_blocks=1)
    return [point | {"model.dtype": dtype} for point in crossed for dtype in ("float32", "bfloat16")]
