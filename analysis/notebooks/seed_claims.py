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

ROOT = next(folder for folder in (pathlib.Path.cwd(), *pathlib.Path.cwd().parents) if (folder / "research").is_dir())
sys.path.insert(0, str(ROOT))

from IPython.display import Image, display  # noqa: E402

from analysis import claims, frame, style  # noqa: E402
from research.runs import files  # noqa: E402
from research.sweeps import experiment  # noqa: E402

rows = files.read_lines(ROOT / "analysis/results/seed_claims.jsonl")
print(rows[0]["topology"], rows[0]["versions"], rows[0]["date"])

# %% [markdown]
# A claim is tested at each length that it names, or at all where it names none, and at every program, schedule or
# number of heads it speaks of. `confirmed`: all tests hold. `partly`: some do. `refuted`: none does. `not measurable
# here`: there is nothing to test, since compiling gives no such number, or since it did not compile on this machine.
# The 48 % are two tests: whether memory is saved, and so much. 000 and 001 are the seeds; what goes beyond them is
# claimed by this repository. Stars and dotted bars are claimed values; MaxText's were taken beforehand, on the same
# machine, and this repository's layers attend with 8 heads at once.

# %%
module, _ = experiment.load(str(ROOT / "experiments/seed_claims.py"))
display(Image(style.png(claims.draw, module.claims(rows))))

# %% [markdown]
# The same in words:

# %%
print("\n".join(module.report(rows)))

# %% [markdown]
# Forward and backward of everything that was tried, failures included:

# %%
table = frame.aot_table(rows)
table = table[table["phase"] == "forward_backward"]
shown = table[["setting", "seq_len", "status"]].copy()
shown["temp GiB"] = (table["temp_bytes"] / 2**30).round(2)
shown["peak GiB"] = (table["peak_bytes"] / 2**30).round(2)
shown["schedule s"] = table["schedule_seconds"].round(2)
shown["compile s"] = table["compile_seconds"].round(1)
shown["roofline ms"] = (table["roofline_seconds"] * 1e3).round(1)
shown["useful"] = table["useful_fraction"].round(3)
print(shown.to_string(index=False))
