"""Two flash attentions under one softmax, for GPUs: `attend` has the functions of `attend.Backend`."""

from research.attention.backends.joined.attend import SCHEDULES, compute, cost, prepare, resolve

__all__ = ["SCHEDULES", "compute", "cost", "prepare", "resolve"]
