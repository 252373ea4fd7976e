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
# # What do flash kernels gain on a GPU, as far as a compiler can tell?
#
# `python launch/aot.py --config=experiments/gpu_attention.py` compiles one attention, forward and backward, for an H100
# and an A100, without either. Nothing was run: launches and bytes are the compiler's, there are no times. Its rows were
# put into `analysis/results/gpu_attention.jsonl` by
#
#     cp runs/aot/gpu_attention/results.jsonl analysis/results/gpu_attention.jsonl

# %%
import pathlib
import sys

ROOT = next(folder for folder in (pathlib.Path.cwd(), *pathlib.Path.cwd().parents) if (folder / "research").is_dir())
sys.path.insert(0, str(ROOT))

from IPython.display import Image, display  # noqa: E402

from analysis import gpu, style  # noqa: E402
from experiments import gpu_attention  # noqa: E402
from research.runs import files  # noqa: E402

rows = files.read_lines(ROOT / "analysis/results/gpu_attention.jsonl")
print(rows[0]["date"], rows[0]["versions"])
print(len(rows), "rows,", sum(row["status"] != "ok" for row in rows), "not compiled")

# %% [markdown]
# A launch takes some microseconds whatever it computes, so thousands of them in a row are slow on any GPU:
# `blockwise` walks through blocks one after the other. `dot_product` launches little and takes quadratic memory. The
# joined form launches little and grows linearly, but where CSA's choice is a mask (`stream`).

# %%
display(Image(style.png(gpu.draw, rows)))

# %%
for line in gpu_attention.report(rows):
    print(line)

# %% [markdown]
# What was refused, and why: the cross of splash's schedules, whose kernels are for TPUs, is among the points of every
# experiment.

# %%
reasons = {}
for row in rows:
    if row["status"] != "ok":
        reasons.setdefault((row["status"], row["message"].splitlines()[0][:120]), []).append(row)
for (status, message), found in reasons.items():
    print(f"{len(found)} rows: {status}: {message}")
