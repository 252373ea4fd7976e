"""What a run would be, without training: nothing is written, and no array is made."""

from typing import Any

import jax
import rich.console

from research import data as data_lib
from research.model import feed_forward
from research.parallel import batch as parallel
from research.settings.config import Settings, as_config
from research.training import flops, optimizer, report, trainer
from research.training import step as step_lib
from research.validation import notes, validate


def dry_run(settings: Settings, console: rich.console.Console) -> None:
    """Prints the resolved config, what takes effect, all shapes, FLOPs, and the memory of a step and of validation.

    Both are compiled.

    Raises:
      ConfigError: a setting is impossible, or `data.path` leads to no text.
      NotImplementedError: a backend cannot serve the request.
      MemoryError: the compiler finds too little memory.
    """
    spec = validate(settings)
    mesh = parallel.mesh(settings)
    data = data_lib.build(settings, spec.alignment)
    state = jax.eval_shape(lambda: step_lib.init(spec, optimizer.build(spec), settings.seed))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=parallel.replicated(mesh)), state)
    batch = jax.tree.map(_shape, parallel.distribute(next(data.validation_batches(1)), mesh))

    console.print(str(as_config(settings)), markup=False, highlight=False)
    report.show_run(console, settings, state.params, spec.effective() | feed_forward.effective(spec, mesh.size))
    for note in notes(spec):
        console.print(f"warning: {note}", soft_wrap=True, markup=False, highlight=False)
    told = ", ".join(f"{name} {value:,}" for name, value in data.describe().items() if isinstance(value, int))
    console.print(
        f"data: {data.describe()['source']}, {told.replace('_', ' ')}; "
        f"batch: int32 {[*batch['inputs'].shape]} over {mesh.size} devices",
        soft_wrap=True,
    )
    per_token = flops.per_token(spec, state.params)
    console.print(f"FLOPs of training: {per_token:.4g} a token, {per_token * batch['inputs'].size:.4g} a step")
    *_, cost = trainer.programs(spec, state, batch, mesh)
    report.show_memory(console, state, batch, cost)


def _shape(x: jax.Array) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
