"""Overrides that a search saved under a name, for `--preset=NAME`: `<run.root>/presets/NAME.json`."""

import pathlib

from research.errors import ConfigError
from research.runs import files
from research.settings import fields


def save(root: str, name: str, settings: fields.Overrides) -> pathlib.Path:
    """Saves overrides for `--preset=NAME`, and returns the file."""
    path = _path(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, settings)
    return path


def load(root: str, name: str) -> fields.Overrides:
    """The overrides of that name, none for an empty one.

    Raises:
      ConfigError: there is no such preset; names those that there are.
    """
    if not name:
        return {}
    path = _path(root, name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json"))) or "none"
        raise ConfigError(f"--preset={name}: no {path}; there are {known}")
    settings = files.read_json(path)
    return {name: tuple(setting) if isinstance(setting, list) else setting for name, setting in settings.items()}


def _path(root: str, name: str) -> pathlib.Path:
    return pathlib.Path(root).expanduser() / "presets" / f"{name}.json"
