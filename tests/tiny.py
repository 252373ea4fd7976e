"""An experiment that trains in seconds: in this process through `get_config`, in others as `--config=tests/tiny.py`."""

from research.settings.config import base_config
from research.sweeps import experiment

ARGS = ("",)
HEADLINE = ("step_seconds", "temp_bytes")


def get_config(arg=""):
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.model.layers = ("hca",)
    config.model.hidden = 32
    config.model.ffn_width = 32
    config.attention.backend = "dot_product"
    config.attention.window = 16
    config.attention.hca_ratio = 16
    config.attention.heads = 2
    config.attention.head_width = 16
    config.attention.rope_width = 8
    config.attention.q_rank = 16
    config.attention.out_rank = 8
    config.data.seq_len = 64
    config.data.batch_size = 2
    config.optimizer.warmup_steps = 2
    config.train.steps = 12
    config.train.log_every = 1
    config.train.eval_every = 6
    config.train.eval_batches = 2
    config.train.checkpoint_every = 5
    config.wandb.mode = "disabled"
    return config


def sweep(arg=""):
    """The second point fails while it runs."""
    experiment.check_arg(arg, ARGS)
    return [{"optimizer.learning_rate": rate} for rate in (1e-3, 1e30)]


def check(rows):
    return [f"{sum(row['status'] == 'ok' for row in rows)} of {len(rows)} agree"]
