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
# # Which kinds of attention find what was said far beyond the window?
#
# `python launch/sweep.py --config=experiments/recall.py:demo` trains two-layer models with a window of 8 on two
# tasks whose distances are known: a needle, one pair of key and value in noise, and recall, six pairs whose keys are
# asked for. One seed each. Its results were put into one file by
#
#     python analysis/collect.py runs/recall-demo analysis/results/recall.jsonl

# %%
import pathlib
import sys

ROOT = next(folder for folder in (pathlib.Path.cwd(), *pathlib.Path.cwd().parents) if (folder / "research").is_dir())
sys.path.insert(0, str(ROOT))

from IPython.display import Image, display  # noqa: E402

from analysis import plot, recall, style  # noqa: E402
from analysis.recall import trained  # noqa: E402
from research.runs import files  # noqa: E402
from research.training import accuracy  # noqa: E402

rows = files.read_lines(ROOT / "analysis/results/recall.jsonl")
print({name: rows[0]["environment"][name] for name in ("date", "python", "platform", "cpus")})
print(rows[0]["environment"]["packages"])
print(len(rows), "points,", sum(row["status"] != "ok" for row in rows), "failed")

# %% [markdown]
# Share of right answers by distance; a guess is right once in 16. Two sliding layers carry nothing further than
# 2 x (8 - 1) = 14 tokens.

# %%
display(Image(style.png(recall.draw, rows)))

# %%
for row in trained(rows):
    told = ", ".join(f"{first} to {last}: {share:.2f}" for (first, last), share in accuracy.shares(row).items())
    print(f"{row['overrides'].get('data.task', 'needle'):6} {recall.name(row)}: {told}")

# %% [markdown]
# How the models came there: training loss, and validation (hollow). A uniform guess costs log(16) = 2.77 nats. Where a
# curve still falls at its last step, or never left that line, the accuracy above is that of an unfinished training, not
# a limit of the kind; `LOG.md` says what is known of it.

# %%
needle = [row for row in trained(rows) if "data.task" not in row["overrides"]]
display(Image(style.png(plot.draw, needle, (), "needle")))

# %%
display(Image(style.png(plot.draw, [row for row in trained(rows) if row not in needle], (), "recall of six pairs")))
