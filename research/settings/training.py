"""Settings of training."""

import dataclasses

from research.settings.group import NOT_NEGATIVE, POSITIVE, Allowed, Group, setting

_SHARE = Allowed(lambda share: 0 <= share <= 1, "between 0 and 1")
_DECAY = Allowed(lambda decay: 0 <= decay < 1, "at least 0 and below 1")
_EVERY = Allowed(lambda steps: steps >= 0, "0 (only at the end) or more")


@dataclasses.dataclass(frozen=True)
class Optimizer(Group, group="optimizer"):
    """AdamW with warm-up, cosine decay and clipping."""

    learning_rate: float = setting(3e-3, "after the warm-up", POSITIVE)
    final_fraction: float = setting(0.1, "of the learning rate, where the cosine ends", _SHARE)
    warmup_steps: int = setting(20, "over which the learning rate rises", NOT_NEGATIVE)
    weight_decay: float = setting(0.1, "of matrices", NOT_NEGATIVE)
    b1: float = setting(0.9, "decay of the mean gradient", _DECAY)
    b2: float = setting(0.95, "decay of the mean squared gradient", _DECAY)
    clip_norm: float = setting(1.0, "to which the gradient's global norm is clipped", POSITIVE)


@dataclasses.dataclass(frozen=True)
class Train(Group, group="train"):
    """How long is trained, and what is done on the way."""

    steps: int = setting(200, "updates", POSITIVE)
    accumulate: int = setting(
        1, "micro-batches that the rows of a batch are computed in, one after the other, before an update", POSITIVE
    )
    ahead: int = setting(
        1, "updates that are started before the numbers of an earlier one are waited for; 0: none", NOT_NEGATIVE
    )
    log_every: int = setting(10, "steps between rows of metrics", POSITIVE)
    eval_every: int = setting(100, "steps between validations; 0: only at the end", _EVERY)
    eval_batches: int = setting(8, "of a validation", POSITIVE)
    checkpoint_every: int = setting(100, "steps between checkpoints; 0: at the end, and when a run is stopped", _EVERY)
    keep_last: int = setting(2, "newest checkpoints that are kept", POSITIVE)
    keep_best: int = setting(1, "checkpoints kept beside them: lowest validation loss", NOT_NEGATIVE)
    start_from: str = setting("", "id of a run below run.root, or its path: its parameters and moments are taken over")


@dataclasses.dataclass(frozen=True)
class Profile(Group, group="profile"):
    """A trace."""

    steps: int = setting(0, "traced into the run's folder, after the first ones, which warm up", NOT_NEGATIVE)
