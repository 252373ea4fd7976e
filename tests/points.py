"""Sweeps over `tests/tiny.py`'s config: `:grid` sets fields as products do, `:chain` has points after points."""

from research.sweeps import experiment
from tests import tiny

ARGS = ("grid", "chain")
HEADLINE = tiny.HEADLINE


def get_config(arg="grid"):
    experiment.check_arg(arg, ARGS)
    return tiny.get_config()


def sweep(arg="grid"):
    """Of the grid, the last point alone sets the steps. Of the chain, `first` is tiny's good point, `fails` its bad."""
    experiment.check_arg(arg, ARGS)
    if arg == "grid":
        return [
            {"attention.backend": "dot_product", "data.seq_len": 64},
            {"attention.backend": "blockwise", "data.seq_len": 64},
            {"attention.backend": "blockwise", "data.seq_len": 128},
            {"attention.backend": "splash", "data.seq_len": 256, "train.steps": 4},
        ]
    first, fails = {"optimizer.learning_rate": 1e-3}, {"optimizer.learning_rate": 1e30}
    return [
        _after(fails, seed=1),
        _after(first, seed=2),
        fails,
        first,
    ]


def _after(before, seed):
    start = experiment.label(before)
    return experiment.Point(
        {"seed": seed, "optimizer.learning_rate": 2e-3, "train.start_from": start}, after=experiment.label(before)
    )
