"""Small files that are cut short, emptied or overwritten: whole, absent, or named in one line."""

import json
import os
import pathlib
import warnings

import pytest

from research.errors import DamagedError
from research.runs import files

ROWS = [{"step": step, "loss": step / 3} for step in range(1, 6)]


@pytest.fixture
def path(tmp_path):
    files.write_lines(tmp_path / "metrics.jsonl", ROWS)
    return tmp_path / "metrics.jsonl"


def append(path, content):
    with open(path, "ab") as file:
        file.write(content)


@pytest.mark.parametrize("rest", [b'{"step": 6, "lo', b"{", b"\0\0\0\0", b'{"step": 6}'])
def test_last_line_cut_short_is_left_out_with_a_warning_that_names_it(path, rest):
    append(path, rest)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 6: cut short, left out$"):
        assert files.read_lines(path) == ROWS
    with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 6: cut short, dropped$"):
        files.repair_lines(path)
    files.append_line(path, {"step": 6})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert files.read_lines(path) == [*ROWS, {"step": 6}]


@pytest.mark.parametrize("line", [b"\0\0\0\0\0\0", b'{"step": 3, "grad', b"", b"12", b'"text"', b"\xff\xfe"])
@pytest.mark.parametrize("place", [0, 2, 5])
def test_any_other_damage_is_one_line_that_names_file_and_line(path, line, place):
    lines = path.read_bytes().split(b"\n")[:-1]
    lines.insert(place, line)
    path.write_bytes(b"\n".join(lines) + b"\n")
    before = path.read_bytes()
    told = rf"^\S*metrics\.jsonl, line {place + 1}: .* is no row; remove the line[^\n]*$"
    with pytest.raises(DamagedError, match=told):
        files.read_lines(path)
    files.repair_lines(path)
    assert path.read_bytes() == before


def test_no_file_has_no_rows(tmp_path):
    assert files.read_lines(tmp_path / "absent") == []
    assert files.read_json(tmp_path / "absent") == {}
    files.repair_lines(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "it is empty"), (b"\0\0", "no JSON"), (b'{"a": ', "no JSON"), (b"\xff", "no JSON")]
)
def test_damaged_json_is_one_line_that_names_the_file(tmp_path, content, said):
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(DamagedError, match=rf"^\S*summary\.json: .*{said}[^\n]*; put a copy back, or remove it$"):
        files.read_json(tmp_path / "summary.json")


def test_json_survives_a_kill_while_it_is_written(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    files.write_json(path, {"status": "ok"})

    def killed(*_):
        raise KeyboardInterrupt

    for name in ("pathlib.Path.replace", "os.fsync"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(name, killed)
            files.write_json(path, {"status": "error"})
        assert files.read_json(path) == {"status": "ok"}


def test_what_is_written_is_on_the_disk_before_its_name(tmp_path, monkeypatch):
    """File, then name, then the folder that holds the name."""
    done, fsync, replace = [], os.fsync, pathlib.Path.replace

    def noted_fsync(handle):
        done.append(os.readlink(f"/proc/self/fd/{handle}").removeprefix(str(tmp_path)))
        fsync(handle)

    def noted_replace(self, target):
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(pathlib.Path, "replace", noted_replace)
    files.write_json(tmp_path / "a.json", {})
    assert done == ["/a.json.new", "rename", ""]


def test_numbers_that_json_does_not_know_are_refused(path):
    with pytest.raises(ValueError, match="JSON compliant"):
        files.append_line(path, {"loss": float("nan")})
    assert files.read_lines(path) == ROWS
    assert json.loads(path.read_text().splitlines()[-1]) == ROWS[-1]
