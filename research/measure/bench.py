"""Runs the points of an experiment's sweep as single attentions, each in a process of its own."""

import dataclasses
from typing import Any

import ml_collections

from research.measure import apart, op
from research.model import spec as model_spec
from research.settings import fields
from research.sweeps import sweep


def plan(target: str, common: fields.Overrides, platform: str) -> list[tuple[fields.Overrides, op.Point, float]]:
    """The distinct points, each with its overrides and time-out in seconds; all are checked before any is run.

    Raises:
      ConfigError: a point is invalid; names every such point.
    """
    points = {}
    for overrides, config in sweep.configs(target, common, platform):
        for point in of_config(config, platform):
            points.setdefault(point, (overrides, point, config.bench.timeout_minutes * 60))
    return list(points.values())


def of_config(config: ml_collections.ConfigDict, platform: str) -> list[op.Point]:
    """The attention of every kind of layer in a config."""
    spec = model_spec.from_config(config, platform).attention
    return [
        op.Point(
            backend=spec.backend,
            options=spec.options(kind),
            visibility=spec.visibility(kind),
            batch=config.data.batch_size,
            seq_len=config.data.seq_len,
            heads=spec.heads,
            head_width=spec.head_width,
            dtype=config.model.dtype,
            repeats=config.bench.repeats,
        )
        for kind in dict.fromkeys(config.model.layers)
    ]


def run(point: op.Point, timeout: float) -> list[dict[str, Any]]:
    """The rows of a point, a row per phase; phases that a crash or the time-out swallowed are rows that say so."""
    rows, ending, message = apart.run("research.measure.op", op.to_json(point), timeout, {})
    known = {row["phase"] for row in rows}
    lost = {
        "backend": point.backend,
        "visibility": point.visibility.kind,
        "seq_len": point.seq_len,
        "dtype": point.dtype,
        "requested": dataclasses.asdict(point.options),
        "status": ending,
        "message": message,
    }
    return rows + [lost | {"phase": phase} for phase in op.PHASES if phase not in known]
