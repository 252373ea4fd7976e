"""Makes a run of published DeepSeek-V4 weights, for training to start from:

    python launch/import_weights.py FOLDER --id=flash
    python launch/train.py --config=experiments/deepseek_v4.py:FOLDER --config.train.start_from=flash

FOLDER holds config.json and safetensors files, in the published names or in those of Hugging Face transformers;
bfloat16, FP8 and FP4 are read. An import that was stopped goes on when it is started again.
"""

import pathlib

import rich.console
from absl import flags as absl_flags

from launch import flags
from research.importing import config
from research.runs.folder import IMPORTED
from research.settings.config import Settings, base_config, read
from research.settings.fields import override

_ROOT = absl_flags.DEFINE_string("root", "runs", "the folder of runs")
_ID = absl_flags.DEFINE_string("id", "", "the run's; by default the folder's name")


def settings() -> Settings:
    """Of the model in the folder, and of the run to be made."""
    folder = _folder()
    made = base_config()
    override(made, config.read(folder))
    made.run.root = _ROOT.value
    made.run.id = _ID.value or folder.absolute().name
    return read(made)


def main() -> int:
    """Imports, and returns the exit code."""
    from research.importing import weights

    made = settings()
    summary = weights.load(_folder(), made, rich.console.Console())
    told = summary[IMPORTED]
    print(f"{told['tensors']} tensors, digest {told['digest'][:16]}: {made.run.root}/{made.run.id}")
    return 0


def _folder() -> pathlib.Path:
    (folder,) = flags.arguments()
    return pathlib.Path(folder).expanduser()


if __name__ == "__main__":
    flags.run(main, check=settings, takes=["FOLDER"])
