"""Writes a run's parameters as DeepSeek-V4 weights, which Hugging Face transformers loads:

    python launch/export_weights.py ID FOLDER

ID is that of a run that ended well, or its path; `ID@STEP` takes another checkpoint than its newest.
"""

import pathlib

import rich.console
from absl import flags as absl_flags

from launch import flags

_ROOT = absl_flags.DEFINE_string("root", "runs", "the folder of runs")
_DTYPE = absl_flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of the matrices")


def main() -> int:
    """Exports, and returns the exit code."""
    from research.importing import weights
    from research.runs import source

    named, target = flags.arguments()
    found = source.find("ID", str(pathlib.Path(_ROOT.value).expanduser()), named)
    for file in weights.save(found, pathlib.Path(target).expanduser(), _DTYPE.value, rich.console.Console()):
        print(file)
    return 0


if __name__ == "__main__":
    flags.run(main, takes=["ID", "FOLDER"])
