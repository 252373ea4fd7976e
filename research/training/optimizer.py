"""AdamW with warm-up, cosine decay and clipping by global norm."""

import haiku as hk
import ml_collections
import optax


def learning_rate(config: ml_collections.ConfigDict) -> optax.Schedule:
    """The learning rate of each update, counted from 0.

    Update i of the warm-up takes the share (i + 1) / (warmup_steps + 1), so that none is lost to a rate of 0; a cosine
    leads from the full rate at update `warmup_steps` to `final_fraction` of it at `train.steps`.
    """
    peak, warmup = config.optimizer.learning_rate, config.optimizer.warmup_steps
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=config.train.steps,
        end_value=peak * config.optimizer.final_fraction,
    )


def build(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
    """The optimizer that `config.optimizer` describes, over `config.train.steps` updates."""
    settings = config.optimizer
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            learning_rate(config),
            b1=settings.b1,
            b2=settings.b2,
            weight_decay=settings.weight_decay,
            mask=decayed,
        ),
    )


def decayed(params: hk.Params) -> dict[str, dict[str, bool]]:
    """Which parameters weight decay pulls at: matrices, not scales, sinks or biases.

    Told by name: the axis along which layers are stacked makes a vector look like a matrix.
    """
    return hk.data_structures.map(lambda module, name, value: name not in _NOT_DECAYED, params)


_NOT_DECAYED = ("scale", "sinks", "position_bias")
