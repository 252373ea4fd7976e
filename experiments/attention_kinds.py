"""What do compressed entries buy beyond the sliding window, in bits per byte?

    python launch/sweep.py --config=experiments/attention_kinds.py:demo

Four patterns of three layers: sliding only, HCA, CSA, and all three interleaved. The window is short against the
rows, so what lies further back reaches a token through compressed entries or not at all. Documents start anywhere,
for then the packing does not depend on the ratios and every point sees exactly the same batches.

`:demo`, on 2 cores of an x86 machine that was busy with other work, Python 3.11, 2026-11-29: 11 points, 11 minutes.
Bits per byte after 600 steps, with seeds 0 and 1: sliding 2.620 and 2.617, HCA 2.703 and 2.604, CSA 2.599 and 2.605,
interleaved 2.591 and 2.634. Seeds differ by up to 0.1, so at this size the kinds cannot be told apart.

The points after the first four run for a few steps only: they show what the mask strategies cost on these models, as
`mask_strategies` does layer by layer. Their losses are those of a run that has hardly begun.
"""

import ml_collections

from experiments import mask_strategies
from research.settings.config import base_config
from research.sweeps import cross, experiment

ARGS = ("", "demo")
HEADLINE = ("val_bits_per_byte", "step_seconds", "temp_bytes")

_PATTERNS = (("sliding",) * 3, ("hca",) * 3, ("csa",) * 3, ("sliding", "csa", "hca"))


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """'' is sized for an accelerator with 16 GiB and up, 'demo' for two CPU cores."""
    experiment.check_arg(arg, ARGS)
    if arg == "demo":
        config = base_config()
        config.attention.heads = 2
        config.attention.window = 32
        config.attention.hca_ratio = 32
        config.attention.top_k = 16
        config.data.batch_size = 2
        config.train.steps = 600
        config.train.eval_batches = 24
    else:
        config = mask_strategies.get_config()
        config.model.repeats = 4
        config.train.steps = 5000
        config.train.eval_every = 500
        config.train.eval_batches = 32
        config.train.checkpoint_every = 500
    config.train.log_every = 10
    config.data.align_starts = False
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 5
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """The patterns under the default backend; then the cross, briefly."""
    experiment.check_arg(arg, ARGS)
    patterns = [{"model.layers": layers} for layers in _PATTERNS]
    crossed, sizes = (patterns[-1:], (128, 256)) if arg == "demo" else (patterns, (512, 1024))
    brief = [pattern | {"train.steps": 6} for pattern in crossed]
    return patterns + cross.points(get_config(arg), brief, sizes, ("static", "dynamic", "hybrid"), unscheduled=True)
