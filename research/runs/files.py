"""Small files that are whole or absent: JSON, and JSON lines. Nothing heavy is imported here.

A file is written under a temporary name, brought to the disk and renamed. Of JSON lines only the last may be cut short,
by a kill while it was appended; every other damage is an error that names file and line.
"""

import json
import os
import pathlib
import warnings
from typing import Any

from research import errors


def write_text(path: pathlib.Path, text: str) -> None:
    """`write_bytes` of a text as UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Writes all of it or, if killed, nothing.

    Raises:
      OSError: naming the file; what it held before is still there.
    """
    beside = path.with_name(path.name + ".new")
    try:
        with errors.disk_errors(path):
            with open(beside, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            _sync_folder(path.parent)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def write_json(path: pathlib.Path, value: Any) -> None:
    """`write_text` of a value as JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: pathlib.Path) -> Any:
    """Reads a file that `write_json` wrote; an empty dict where there is none.

    Raises:
      DamagedError: it is not JSON.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        return json.loads(content)
    except ValueError as error:  # of JSON, or of UTF-8
        found = "it is empty" if not content else f"it is no JSON: {error}"
        raise errors.DamagedError(f"{path}: {found}; put a copy back, or remove it") from error


def append_line(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Appends a row, of finite numbers, to a file of JSON lines that `repair_lines` has seen."""
    line = json.dumps(row, allow_nan=False) + "\n"
    with errors.disk_errors(path), open(path, "a", encoding="utf-8") as file:
        file.write(line)


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, none where there is no file; a last line cut short is left out with a warning.

    Raises:
      DamagedError: another line is no row; names it.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    *lines, rest = content.split(b"\n")
    if rest:
        warnings.warn(f"{path}, line {len(lines) + 1}: cut short, left out", stacklevel=2)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            shown = repr(line[:40].decode(errors="replace"))
            raise errors.DamagedError(f"{path}, line {number}: {shown} is no row; remove the line, or put a copy back")
        rows.append(row)
    return rows


def write_lines(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """`write_text` of rows as JSON lines."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def repair_lines(path: pathlib.Path) -> None:
    """Cuts off what a kill left of a line, so that rows can be appended; warns, with file and line."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        warnings.warn(f"{path}, line {content.count(bytes([10])) + 1}: cut short, dropped", stacklevel=2)
        with errors.disk_errors(path), open(path, "r+b") as file:
            file.truncate(whole)


def _sync_folder(folder: pathlib.Path) -> None:
    """Brings a rename to the disk, where folders can be synced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems refuse; the rename itself is done
        pass
    finally:
        os.close(handle)
