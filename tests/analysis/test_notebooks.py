"""Every notebook runs from top to bottom on committed results, and is the text file beside it."""

import pathlib
import re

import jupytext
import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "analysis" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["gpu_attention", "masks", "recall", "seed_claims", "training_curves"]


# By default one for all.
QUICK = [pytest.param(path, marks=() if path.stem == "recall" else pytest.mark.slow) for path in NOTEBOOKS]


@pytest.mark.parametrize("path", QUICK, ids=[path.stem for path in NOTEBOOKS])
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebook_was_run_and_shows_no_path_of_a_machine(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")  # no warnings
    text = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    assert not re.search(r"""(^|[\s"'(=])(/\w|[A-Z]:\\)""", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_its_text_file(path):
    def sources(notebook):
        return [(cell.cell_type, cell.source) for cell in notebook.cells]

    assert sources(nbformat.read(path, as_version=4)) == sources(jupytext.read(path.with_suffix(".py")))
