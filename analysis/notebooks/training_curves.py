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
# # Training curves of a sweep, by mask strategy
#
# `python launch/sweep.py --config=experiments/mask_strategies.py:demo` trains small language models, one per attention
# kind, backend, schedule, block size and `dq_reduction_steps`. Its results were put into one file by
#
#     python analysis/collect.py runs/mask_strategies-demo analysis/results/mask_strategies_demo.jsonl
#
# Two x86-64 cores without accelerator, at times busy with other work, so that single times may be off by a factor of
# two; losses and bytes repeat. The splash kernels are interpreted there: their times say nothing about a TPU.

# %%
import pathlib
import sys

ROOT = next(folder for folder in (pathlib.Path.cwd(), *pathlib.Path.cwd().parents) if (folder / "research").is_dir())
sys.path.insert(0, str(ROOT))

from IPython.display import Image, display  # noqa: E402

from analysis import plot, style, table  # noqa: E402
from research.runs import files  # noqa: E402

rows = files.read_lines(ROOT / "analysis/results/mask_strategies_demo.jsonl")
print({name: rows[0]["environment"][name] for name in ("date", "python", "platform", "cpus")})
print(rows[0]["environment"]["packages"])

# %% [markdown]
# All points of a kind compute the same function, so their curves should lie on one another. The largest difference
# between them at any step, in nats:

# %%
for layers in dict.fromkeys(tuple(row["layers"]) for row in rows):
    kind = [row for row in rows if tuple(row["layers"]) == layers]
    steps = zip(*([entry["loss"] for entry in row["metrics"]] for row in kind if row["status"] == "ok"), strict=True)
    spread = max(max(losses) - min(losses) for losses in steps)
    failed = [table.name(row) for row in kind if row["status"] != "ok"]
    print(f"{'+'.join(layers)}: {len(kind)} points, failed: {failed or 'none'}, spread {spread:.0e}")

# %% [markdown]
# Loss per step and validation (hollow) above; below what each point costs, marked as its curve is:

# %%
display(Image(style.png(plot.draw, rows, ("val_loss", "step_seconds", "temp_bytes"), "mask_strategies:demo")))

# %% [markdown]
# The same as a table, with what took effect of what was asked:

# %%
columns = [heading.replace("\n", " ") for heading in table.headings(rows)]
print("\n".join(" | ".join(line) for line in [columns, *table.cells(rows)]))
