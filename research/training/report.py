"""What a run shows on the terminal."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import haiku as hk
import jax
import rich.box
import rich.console
import rich.progress
import rich.table

from research.settings import fields
from research.settings.config import Settings
from research.training.step import State


def show_run(
    console: rich.console.Console,
    settings: Settings,
    params: hk.Params,
    effective: dict[str, dict[str, Any]],
) -> None:
    """Prints how the config differs from the base, the parameters (or their shapes), and the settings in effect."""
    console.print(_config_table(settings), _parameter_table(params), _effective_table(effective))


def show_memory(console: rich.console.Console, state: State, batch: dict[str, Any], cost: dict[str, Any]) -> None:
    """Prints how the bytes come about that a step and a validation need on each device; `cost` as in `Trainer`."""
    table = rich.table.Table("memory of a device", title="memory, by the compiler's account", box=_BOX)
    table.add_column("MiB", justify="right")
    per_device = cost["argument_bytes"] + cost["temp_bytes"] + cost["output_bytes"] - cost["alias_bytes"]
    # Parameters are among its arguments; the optimizer's state is not, and stays where it is.
    validating = cost["eval_argument_bytes"] + cost["eval_temp_bytes"] + cost["eval_output_bytes"]
    parts = {
        "parameters": _bytes(state.params),
        "optimizer": _bytes(state.opt_state),
        "batch": _bytes(batch),
        "temporaries": cost["temp_bytes"],
        "outputs beside the arguments": cost["output_bytes"] - cost["alias_bytes"],
        "in all": per_device,
        "temporaries of validation": cost["eval_temp_bytes"],
        "in all, validating": validating + _bytes(state.opt_state),
    }
    for name, size in parts.items():
        table.add_row(name, f"{size / 2**20:,.1f}")
    console.print(table)


def _bytes(tree: Any) -> int:
    """Bytes that each device holds of a tree of arrays or their shapes."""
    shards = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * size for shape, size in shards)


def count(params: hk.Params) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@contextlib.contextmanager
def progress(console: rich.console.Console, done: int, steps: int) -> Iterator[Callable[[dict[str, float]], None]]:
    """A progress bar; yields a function that takes the row of a step that ended and moves on by one."""
    columns = (
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(bar_width=10),
        rich.progress.TimeRemainingColumn(compact=True),
        rich.progress.TextColumn("{task.description}"),
    )
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, completed=done)
        shown: dict[str, float] = {}

        def advance(row: dict[str, float]) -> None:
            shown.update(row)
            text = ", ".join(form.format(shown[name]) for name, form in _SHOWN.items() if name in shown)
            bar.update(task, advance=1, description=text)

        yield advance


_SHOWN = {
    "loss": "loss {:.3f}",
    "bits_per_byte": "{:.3f} bits/byte",
    "indexer_kl": "indexer {:.3f} nats",
    "val_bits_per_byte": "validation {:.3f}",
    "val_accuracy": "{:.1%} of answers right",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "{:.1%} MFU",
}


def _config_table(settings: Settings) -> rich.table.Table:
    table = rich.table.Table("field", "base", "this run", title="config, where it differs from the base", box=_BOX)
    base, here = (fields.flat(dataclasses.asdict(which)) for which in (Settings(), settings))
    for name, value in here.items():
        if value != base[name]:
            table.add_row(name, str(base[name]), str(value))
    return table


def _parameter_table(params: hk.Params) -> rich.table.Table:
    table = rich.table.Table("parameter", "shape", title="parameters", box=_BOX, show_footer=True)
    table.add_column("count", justify="right", footer=f"{count(params):,}")
    for module, name, value in hk.data_structures.traverse(params):
        table.add_row(f"{module}/{name}", str(list(value.shape)), f"{value.size:,}")
    return table


def _effective_table(effective: dict[str, dict[str, Any]]) -> rich.table.Table:
    table = rich.table.Table("layer", "effective settings", title="attention and experts", box=_BOX)
    for kind, settings in effective.items():
        table.add_row(kind, ", ".join(f"{name}={setting}" for name, setting in settings.items()))
    return table


_BOX = rich.box.SIMPLE_HEAD
