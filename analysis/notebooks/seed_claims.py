# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The seeds' claims, by the TPU's own compiler
#
# Rows of `launch/aot.py --config=experiments/seed_claims.py`, committed as `analysis/results/seed_claims.jsonl`: what
# was compiled ahead of time for a v5p chip that was not there. Bytes repeat exactly; seconds are those of two shared
# cores, so compare them with each other only. Rooflines are a model. Nothing here was run on a TPU.

# %%
import pathlib
import sys
import tempfile

ROOT = next(folder for folder in (pathlib.Path.cwd(), *pathlib.Path.cwd().parents) if (folder / "research").is_dir())
sys.path.insert(0, str(ROOT))

from IPython.display import Image, display  # noqa: E402

from analysis import aot, frame  # noqa: E402
from research.runs import files  # noqa: E402
from research.sweeps import experiment  # noqa: E402

rows = files.read_lines(ROOT / "analysis/results/seed_claims.jsonl")
print(rows[0]["topology"], rows[0]["versions"], rows[0]["date"])

# %% [markdown]
# Each claim beside what was found:

# %%
module, _ = experiment.load(str(ROOT / "experiments/seed_claims.py"))
print("\n".join(module.report_aot(rows)))

# %% [markdown]
# Forward and backward of everything that was tried, failures included:

# %%
table = frame.of_aot(rows)
table = table[table["phase"] == "forward_backward"]
shown = table[["setting", "seq_len", "status"]].copy()
shown["temp GiB"] = (table["temp_bytes"] / 2**30).round(2)
shown["peak GiB"] = (table["peak_bytes"] / 2**30).round(2)
shown["schedule s"] = table["schedule_seconds"].round(2)
shown["compile s"] = table["compile_seconds"].round(1)
shown["roofline ms"] = (table["roofline_seconds"] * 1e3).round(1)
shown["useful"] = table["useful_fraction"].round(3)
print(shown.to_string(index=False))

# %% [markdown]
# Memory, compile time and useful share against length, and memory against the roofline:

# %%
with tempfile.TemporaryDirectory() as folder:
    picture = pathlib.Path(folder) / "aot.png"
    aot.draw(rows, picture)
    display(Image(picture.read_bytes()))
