"""What a launcher answers to `--help`, and to a command line without arguments."""

import ast
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import ml_collections
import rich.box
import rich.console
import rich.table
from absl import flags as absl_flags

from research.settings import fields
from research.settings.config import Settings, base_config

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"

_SHARED = ("launch.flags", "launch.measuring")  # modules whose flags are a launcher's own, beside its file's


def show_short(console: rich.console.Console, takes: Sequence[str] = ()) -> None:
    """Prints the launcher's description, which begins with an example; `takes` as in `flags.run`."""
    _show_description(console, takes)
    console.print("\n--help shows all flags, experiments and fields.", soft_wrap=True)


def show_whole(
    console: rich.console.Console, config: ml_collections.ConfigDict | None, takes: Sequence[str] = ()
) -> None:
    """Prints the launcher's description and its flags; and experiments and fields, where it takes `--config`.

    Args:
      console: where to.
      config: the one of `--config`, whose values are shown, too; None without it.
      takes: as in `flags.run`.
    """
    _show_description(console, takes)
    console.print(_flags())
    if "config" not in absl_flags.FLAGS:
        return
    console.print(_experiments())
    console.print("Fields of the config are set by --config.GROUP.FIELD=VALUE.", soft_wrap=True)
    base = base_config()
    for group in dataclasses.fields(Settings):
        if isinstance(base[group.name], ml_collections.ConfigDict):
            console.print(_fields(base, config, group.default_factory, group.name))
        else:
            console.print(_fields(base, config, Settings, ""))


def _show_description(console: rich.console.Console, takes: Sequence[str]) -> None:
    words = [sys.argv[0], *takes]
    if "config" in absl_flags.FLAGS:
        words.append("--config=experiments/NAME.py[:ARG] [--config.GROUP.FIELD=VALUE ...]")
    usage = f"usage: python {' '.join(words)} [--FLAG=VALUE ...]\n"
    console.print(usage, markup=False, highlight=False, soft_wrap=True)
    console.print((sys.modules["__main__"].__doc__ or "").strip(), markup=False, highlight=False, soft_wrap=True)


def _flags() -> rich.table.Table:
    table = _table("flag", "default", "meaning")
    modules = absl_flags.FLAGS.flags_by_module_dict()
    for flag in [flag for module in (sys.argv[0], *_SHARED) for flag in modules.get(module, ())]:
        if "." not in flag.name:  # those of fields exist once there is a --config
            default = "" if flag.default in (None, "", [], False) else flag.default_as_str.strip("'")
            table.add_row(f"--{flag.name}", default, " ".join(flag.help.split()))
    return table


def _experiments() -> rich.table.Table:
    table = _table("--config=", "question")
    for path in sorted(EXPERIMENTS.glob("[!_]*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))  # not imported, which would take seconds
        (args,) = (
            ast.literal_eval(node.value)
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ARGS"
        )
        names = (f"experiments/{path.name}{arg and f':{arg}'}" for arg in args)
        table.add_row("\n".join(names), (ast.get_docstring(module) or "").partition("\n")[0])
    return table


def _fields(
    base: ml_collections.ConfigDict, config: ml_collections.ConfigDict | None, group: type, name: str
) -> rich.table.Table:
    """The fields of a group, or without a name those of the config itself."""
    table = _table("field", "default", "meaning, and what is allowed", title=(group.__doc__ or "").partition("\n")[0])
    if config is not None:
        table.add_column("here", overflow="fold")
    for field in dataclasses.fields(group):
        if "meaning" not in field.metadata:
            continue
        path, allowed = f"{name}.{field.name}".lstrip("."), field.metadata["allowed"]
        default = fields.value(base, path)
        meaning = f"{field.metadata['meaning']}; {allowed.words}" if allowed else field.metadata["meaning"]
        here = [] if config is None else [_changed(fields.value(config, path), default)]
        table.add_row(f"--config.{path}", str(default), meaning, *here)
    return table


def _changed(value: Any, default: Any) -> str:
    return "" if value == default else str(value)


def _table(*columns: str, title: str = "") -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, title=title or None, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=place == 0)
    return table
