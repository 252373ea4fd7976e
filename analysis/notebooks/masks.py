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
# # Who sees whom, and which blocks of keys a kernel visits for it
#
# The rule is `research/attention/visibility.py`, and nothing else: these pictures evaluate it.

# %%
import pathlib
import sys

ROOT = next(folder for folder in (pathlib.Path.cwd(), *pathlib.Path.cwd().parents) if (folder / "research").is_dir())
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from IPython.display import Image, display  # noqa: E402

from analysis import blocks, patterns, style  # noqa: E402
from research import devices  # noqa: E402
from research.attention.visibility import PADDING  # noqa: E402
from research.measure import masks  # noqa: E402
from research.settings.config import Settings  # noqa: E402

devices.ignore_absent_devices()

# %% [markdown]
# 48 tokens, a window of 8, HCA's ratio 8, CSA's ratio 4 and top 3, its scores drawn at random. The rows of pictures are
# one document; three documents of 13, 18 and 17 tokens, where an entry whose tokens belong to two of them is seen by
# nobody; and a document of 31 tokens before 17 of padding, which neither sees nor is seen.

# %%
packings = {
    "one document": patterns.ONE_DOCUMENT,
    "packed": np.repeat(np.arange(3, dtype=np.int32), (13, 18, 17)),
    "padded": np.repeat(np.array([0, PADDING], np.int32), (31, 17)),
}
panels = [
    patterns.Panel(f"{visibility.kind}, {packing}", visibility, segments)
    for packing, segments in packings.items()
    for visibility in patterns.KINDS.values()
]
display(Image(style.png(patterns.draw, panels)))

# %% [markdown]
# Splash visits blocks of keys: an empty block is skipped, a full one needs no mask, a partial one does. 2,048 tokens in
# blocks of 128, a window of 128, and a ratio of 4 for both kinds so that there is something to see of the entries.
# `hybrid` lists CSA's local blocks before the program runs and masks entries alone, `dynamic` all of it at run time;
# every block that a query could reach holds something chosen here, so that both visit the same.

# %%
TOKENS, BLOCK = 2048, 128
attention = {"backend": "splash", "hca_ratio": 4, "block_q": BLOCK, "block_kv": BLOCK, "dq_reduction_steps": 3}
settings = Settings().replace(data={"seq_len": TOKENS}, attention=attention)
ways = (("sliding", "schedule", "closed_form"), ("hca", "schedule", "closed_form"))
ways += tuple(("csa", "csa_schedule", name) for name in ("hybrid", "dynamic"))
programs = [
    program
    for kind, field, name in ways
    for program in masks.programs(settings.replace(model={"layers": (kind,)}, attention={field: name}))
]
display(Image(style.png(blocks.draw, programs)))

# %% [markdown]
# What they cost: `useful` is the share of the pairs in visited blocks that are visible, bytes are those of both
# kernels' masks on the device. Blocks that look alike share one mask, where it is known before the program runs.

# %%
for program, (kind, *_) in zip(programs, ways, strict=True):
    row = masks.measure(program)
    counts = f"{row['full']} full, {row['partial']} partial blocks, {row['unique_partial']} masks held"
    size = f"{row['hbm_bytes'] / 2**20:.2f} MiB"
    print(f"{kind:8}{row['schedule']:12} {counts}, {size}, useful {row['useful_fraction']:.0%}")
