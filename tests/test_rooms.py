"""Who may import whom: the contracts in pyproject.toml; and that a room opens on few names."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def lint(root):
    return subprocess.run(
        [pathlib.Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


def test_imports_go_downwards_and_leaves_import_nothing_heavy():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("research/runs/files.py", "import jax", "leaves import nothing heavy"),
        ("research/attention/visibility.py", "from research.training import step", "imports go downwards"),
        ("research/settings/config.py", "import jax", "settings import nothing heavy"),
        ("research/measure/op.py", "import tokamax", "tokamax is imported in two places"),
    ],
)
def test_an_import_that_goes_upwards_is_found(tmp_path, file, line, contract):
    for name in ("research", "launch", "analysis", "experiments", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    top = pathlib.Path(file).parts[0]
    (tmp_path / top).unlink()
    subprocess.run(["cp", "-r", ROOT / top, tmp_path / top], check=True)
    with open(tmp_path / file, "a", encoding="utf-8") as changed:
        changed.write(f"{line}\n")
    done = lint(tmp_path)
    assert (done.returncode, f"{contract} BROKEN" in done.stdout) == (1, True), done.stdout


def test_attention_opens_on_at_most_eight_names():
    names = [path.name for path in (ROOT / "research" / "attention").iterdir() if not path.name.startswith("_")]
    assert len(names) <= 8, names
