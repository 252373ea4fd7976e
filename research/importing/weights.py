"""Published weights as a run that `train.start_from` takes, and a run's parameters as such weights.

Tensor by tensor: nothing but the parameters themselves is ever in memory as a whole, and they are files mapped into it
until the checkpoint is written. What was done is kept: an import that was stopped goes on when it is started again.
"""

import hashlib
import pathlib
import shutil
from collections.abc import Iterable
from typing import Any, NamedTuple

import haiku as hk
import jax
import ml_dtypes
import numpy as np
import rich.console
import rich.progress

from research import errors
from research.attention.spec import Spec
from research.errors import ConfigError
from research.importing import config as config_lib
from research.importing import names, quantized, safetensors
from research.importing.layout import Part, parts
from research.importing.safetensors import Tensor
from research.runs import checkpoints, files
from research.runs import folder as folder_lib
from research.runs.source import Source
from research.settings import fields
from research.settings.config import Settings, from_json
from research.training import optimizer
from research.training import step as step_lib

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

_WORK = "importing"  # below the run's folder, until the checkpoint is written
_JOURNAL = "done.jsonl"
_SOURCE = "source.json"  # what is imported: an import of other files does not go on with these
_SHOWN = 5  # names in a message
_FILE_BYTES = 4 * 2**30  # of each file that is written, unless a tensor is larger


class Stored(NamedTuple):
    """A published tensor: the one of a file that it is part of, where, its shape, and where its scales are."""

    tensor: Tensor
    place: names.Place
    shape: tuple[int, ...]
    scale: Tensor | None

    def read(self, name: str) -> np.ndarray:
        """Its numbers: float32 where it has scales, else as stored."""
        array = self.tensor.read()[self.place]
        return quantized.values(name, array, self.scale.read()) if self.scale else array


def contents(folder: pathlib.Path) -> tuple[dict[str, Stored], list[str]]:
    """The tensors of a checkpoint by published name, and the names of those that predict further tokens.

    Raises:
      ConfigError: two have a name, or what `safetensors.tensors` raises.
    """
    in_files = safetensors.tensors(folder)
    further = [name for name in in_files if names.is_mtp(name)]
    found: dict[str, tuple[str, Tensor, names.Place, tuple[int, ...]]] = {}
    for name, tensor in in_files.items():
        if names.is_mtp(name):
            continue
        for published, place, shape in names.published(name, tensor.shape):
            if published in found:
                raise ConfigError(f"{folder}: {name} and {found[published][0]} are both {published}")
            found[published] = name, tensor, place, shape
    scales = {name for name in found if name.endswith(".scale") and f"{name.removesuffix('.scale')}.weight" in found}
    stored = {}
    for published, (_, tensor, place, shape) in found.items():
        if published in scales:
            continue
        scale = f"{published.removesuffix('.weight')}.scale"
        if published.endswith(".weight") and scale in scales:
            stored[published] = Stored(tensor, place, quantized.shape_of(tensor.dtype, shape), found[scale][1])
        else:
            stored[published] = Stored(tensor, place, shape, None)
    return stored, further


def load(source: pathlib.Path, settings: Settings, console: rich.console.Console) -> dict[str, Any]:
    """Makes the run `settings.run` of a checkpoint's weights, and returns its summary.

    Args:
      source: folder with config.json and safetensors files.
      settings: as `config.read` gives them.
      console: where to show progress.

    Raises:
      ConfigError: a tensor is missing, unknown, of another shape or there twice, or the run's folder has another run.
      DamagedError: a file is cut short.
      InUseError: another process is at work in the run's folder.
      OSError: something could not be read or written.
    """
    folder = pathlib.Path(settings.run.root) / settings.run.id
    empty = shapes(settings).params
    wanted = parts(empty, settings.model)
    stored, further = contents(source)
    _check(source, wanted, stored)
    with folder_lib.owned(folder):
        summary = _finished(folder, settings)
        if summary:
            console.print(f"{folder} is finished, nothing to do", soft_wrap=True)
            return summary
        if further:
            console.print(f"leaves out {len(further)} tensors that predict further tokens (mtp)", soft_wrap=True)
        work = _work(folder, source)
        files.write_json(folder / folder_lib.CONFIG, fields.as_json(settings))
        with errors.disk_errors(work):
            arrays = hk.data_structures.map(lambda *leaf: _mapped(work, *leaf), empty)
            digests = _fill(work, arrays, wanted, stored, console)
        with checkpoints.Writer(folder / checkpoints.FOLDER) as writer:
            writer.save(0, step_lib.State(jax.tree.map(np.asarray, arrays), ()), {})
            writer.wait()
        lines = "".join(f"{digests[part.name]}  {part.name}\n" for part in wanted)
        imported = {"source": str(source), "tensors": len(wanted), "left_out": len(further)}
        imported["digest"] = hashlib.sha256(lines.encode()).hexdigest()
        summary = {"status": folder_lib.FINISHED, "steps": 0, folder_lib.IMPORTED: imported}
        folder_lib.record_start(folder, folder_lib.environment() | {folder_lib.IMPORTED: imported})
        files.write_json(folder / folder_lib.SUMMARY, summary)
        shutil.rmtree(work)
        return summary


def save(source: Source, target: pathlib.Path, dtype: str, console: rich.console.Console) -> list[pathlib.Path]:
    """Writes the parameters of a run as transformers reads them, and returns the files.

    Args:
      source: the run and a step of one of its checkpoints.
      target: folder to be made.
      dtype: of the matrices, one of `DTYPES`; the rest has what the published weights have.
      console: where to show progress.

    Raises:
      ConfigError: the run's model is none that DeepSeek-V4's config.json describes, or `target` is there.
      DamagedError: the checkpoint is not whole.
      OSError: something could not be read or written.
    """
    if target.exists():
        raise ConfigError(f"{target}: is there already; name a folder to be made")
    settings = from_json(files.read_json(source.folder / folder_lib.CONFIG))
    described, like = config_lib.write(settings, dtype), shapes(settings)
    if source.imported:
        like = like._replace(opt_state=())
    params = checkpoints.read(source.folder / checkpoints.FOLDER, source.step, like).state.params

    def outgoing(part: Part) -> safetensors.Outgoing:
        module, name = part.parameter
        stored = _stored_dtype(part, dtype)
        return safetensors.Outgoing(
            part.published_shape,
            stored,
            lambda: part.theirs(np.asarray(params[module][name])[part.place]).astype(stored),
        )

    shards = _shards({part.name: outgoing(part) for part in parts(params, settings.model)})
    target.mkdir(parents=True)
    listed = {}
    for number, shard in enumerate(_tracked(shards, "writing", console), start=1):
        file = target / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        safetensors.write(file, shard)
        listed[file] = list(shard)
    size = sum(tensor.bytes for shard in shards for tensor in shard.values())
    names_to_files = {name: file.name for file, shard in listed.items() for name in shard}
    index = {"metadata": {"total_size": size}, "weight_map": names_to_files}
    files.write_json(target / safetensors.INDEX, index)
    files.write_json(target / config_lib.CONFIG, described)
    return list(listed)


def shapes(settings: Settings) -> step_lib.State:
    """Shapes and dtypes of what is trained."""
    spec = Spec.make(settings)
    return jax.eval_shape(lambda: step_lib.init(spec, optimizer.build(spec), settings.seed))


def _check(source: pathlib.Path, wanted: list[Part], stored: dict[str, Stored]) -> None:
    """Raises ConfigError unless the tensors are those of the model; names the first few that are not."""
    by_name = {part.name: part for part in wanted}
    missing = [name for name in by_name if name not in stored]
    unknown = [name for name in stored if name not in by_name]
    shapes = [
        f"{name} {list(stored[name].shape)} instead of {list(part.published_shape)}"
        for name, part in by_name.items()
        if name in stored and stored[name].shape != part.published_shape
    ]
    kinds = [
        f"{name} of {stored[name].tensor.dtype} for {part.dtype}"
        for name, part in by_name.items()
        if name in stored and not _converts(stored[name], part.dtype)
    ]
    found = {"missing": missing, "unknown": unknown, "of another shape": shapes, "of another kind": kinds}
    told = [
        f"{what}: {', '.join(listed[:_SHOWN])}" + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")
        for what, listed in found.items()
        if listed
    ]
    if told:
        raise ConfigError(f"{source}: tensors are not those of its {config_lib.CONFIG}; {'; '.join(told)}")


def _converts(stored: Stored, dtype: np.dtype) -> bool:
    """Whether numbers without a scale are integers where those are wanted, and only there; those with one are not."""
    is_integer = np.issubdtype(stored.tensor.dtype, np.integer) and stored.scale is None
    return is_integer == np.issubdtype(dtype, np.integer) and (
        stored.scale is not None or stored.tensor.dtype.itemsize > 1
    )


def _finished(folder: pathlib.Path, settings: Settings) -> dict[str, Any]:
    """The summary of this import, if it was finished before.

    Raises:
      ConfigError: the folder holds another run.
    """
    there, summary = files.read_json(folder / folder_lib.CONFIG), files.read_json(folder / folder_lib.SUMMARY)
    is_other = there and (fields.differences(there, fields.as_json(settings)) or not (folder / _WORK).is_dir())
    if is_other and not (folder_lib.IMPORTED in summary and not fields.differences(there, fields.as_json(settings))):
        raise ConfigError(f"config.run.id={settings.run.id!r}: {folder} holds another run; choose another id")
    return summary


def _work(folder: pathlib.Path, source: pathlib.Path) -> pathlib.Path:
    """The folder of an unfinished import of the same files, or a new one."""
    stats = {file.name: file.stat() for file in sorted(source.glob("*.safetensors"))}
    here = {"source": str(source.absolute()), "files": {n: [s.st_size, s.st_mtime_ns] for n, s in stats.items()}}
    work = folder / _WORK
    if work.is_dir() and files.read_json(work / _SOURCE) != here:
        shutil.rmtree(work)
    work.mkdir(exist_ok=True)
    files.write_json(work / _SOURCE, here)
    return work


def _mapped(work: pathlib.Path, module: str, name: str, like: Any) -> np.ndarray:
    """A parameter's array, a file of its own."""
    path = work / f"{module}/{name}.npy".replace("/", ".")
    mode = "r+" if path.is_file() else "w+"
    return np.lib.format.open_memmap(path, mode, like.dtype, tuple(like.shape))


def _fill(
    work: pathlib.Path,
    arrays: hk.Params,
    wanted: list[Part],
    stored: dict[str, Stored],
    console: rich.console.Console,
) -> dict[str, str]:
    """Reads what was not read before; returns a digest of the numbers of each tensor."""
    files.repair_lines(work / _JOURNAL)
    digests = {row["name"]: row["sha256"] for row in files.read_lines(work / _JOURNAL)}
    if digests:
        console.print(f"goes on after {len(digests)} of {len(wanted)} tensors", soft_wrap=True)
    for part in _tracked([part for part in wanted if part.name not in digests], "reading", console):
        module, name = part.parameter
        numbers = np.ascontiguousarray(stored[part.name].read(part.name).astype(part.dtype))
        if np.issubdtype(part.dtype, np.integer):
            _check_table(part, numbers, experts=arrays[module]["scores"].shape[-1])
        arrays[module][name][part.place] = part.ours(numbers)
        digests[part.name] = hashlib.sha256(numbers.tobytes()).hexdigest()
        files.append_line(work / _JOURNAL, {"name": part.name, "sha256": digests[part.name]})
    return digests


def _check_table(part: Part, table: np.ndarray, experts: int) -> None:
    """Raises ConfigError unless each token id has distinct experts that there are."""
    ordered = np.sort(table, axis=-1)
    if ordered.min() < 0 or ordered.max() >= experts:
        raise ConfigError(
            f"{part.name}: has expert {ordered.min()} or {ordered.max()}; must be from 0 to {experts - 1}"
        )
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=-1)
    if twice.any():
        token = int(np.flatnonzero(twice)[0])
        raise ConfigError(f"{part.name}: gives token id {token} the experts {table[token].tolist()}, one of them twice")


def _stored_dtype(part: Part, dtype: str) -> np.dtype:
    """The dtype that a tensor has in published weights, with `dtype` for what is bfloat16 or less there."""
    if np.issubdtype(part.dtype, np.integer):
        return np.dtype(np.int64)
    if part.name.endswith(".weight"):
        return np.dtype(DTYPES[dtype])
    return np.dtype(np.float32)


def _shards(tensors: dict[str, safetensors.Outgoing]) -> list[dict[str, safetensors.Outgoing]]:
    """Splits tensors into files of at most about `_FILE_BYTES`."""
    shards: list[dict[str, safetensors.Outgoing]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.bytes > _FILE_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.bytes
    return shards


def _tracked(items: list, doing: str, console: rich.console.Console) -> Iterable:
    return rich.progress.track(items, doing, console=console, disable=console.quiet)
