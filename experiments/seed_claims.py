"""What do the seeds' claims come to, by the TPU's own compiler, and how far can they be beaten?

    python launch/aot.py --config=experiments/seed_claims.py            # an hour on two cores, resumable
    python launch/aot.py --config=experiments/seed_claims.py:quick      # small sizes, a few minutes

DeepSeek-V4-Flash's attention (64 heads of 512, bfloat16, window 128), compiled ahead of time for a v5p: HCA under every
schedule from 4,096 tokens to 131,072, CSA, sliding dense against splash, what groups of heads save, and whole layers,
beside those of another implementation. The last lines set each claim beside what was found. Step times need a TPU, and
are not among them.
"""

from typing import NamedTuple

import ml_collections

from research.config import base_config
from research.sweeps import cross, experiment

ARGS = ("", "quick")
HEADLINE = ("compile_seconds", "temp_bytes")
GROUP = 8  # heads of a call: those of one group of the output projection

_MIB = 2**-20
# MaxText 0.2.5's layer, splash kernel, same sizes, blocks of 512: MiB of temporaries, and seconds to compile, taken
# beforehand on the machine of `analysis/results/seed_claims.jsonl`, from 32,768 tokens on while it was shared.
_PEER = {
    ("hca", 16384): (10_970, 91),
    ("hca", 32768): (21_935, 132),
    ("hca", 65536): (43_865, 390),
    ("hca", 131072): (87_586, 531),
    ("csa", 16384): (12_707, 144),
    ("csa", 32768): (19_283, 241),
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """'' has the sizes of DeepSeek-V4-Flash, 'quick' an eighth of the heads, a quarter as wide."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.model.layers = ("hca",)
    config.model.dtype = "bfloat16"
    config.attention.backend = "splash"
    config.attention.dq_reduction_steps = 3
    config.attention.rope_width = 64
    config.data.seq_len = 2048
    config.data.batch_size = 1
    if arg == "quick":
        config.attention.heads = GROUP
        config.attention.head_width = config.attention.index_head_width = 128
        return config
    config.model.hidden = 4096
    config.attention.heads = 64
    config.attention.head_width = 512
    config.attention.q_rank = 1024
    config.attention.out_groups = 8
    config.attention.out_rank = 1024
    config.attention.index_heads = 64
    config.attention.index_head_width = 128
    config.attention.top_k = 512
    config.attention.indexer_loss_weight = 0.0  # as in the layers it is compared with
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """HCA's cross, each part of it where a claim is about it; then what is to be beaten, then layers."""
    experiment.check_arg(arg, ARGS)
    quick = arg == "quick"
    lengths = (2048, 4096) if quick else (4096, 8192, 16384, 32768, 65536, 131072)
    long, middle = lengths[-2:], lengths[-4 if not quick else 0]

    def hca(seq_len: int, schedule: str, **others) -> experiment.Overrides:
        strategy = {"attention.schedule": schedule, "attention.dq_reduction_steps": 3}
        return _point("hca", seq_len, **strategy, **others)

    def crossed(lengths: tuple[int, ...], *names: str, blocks: tuple[int, ...] = (0,), steps: int = 3):
        return cross.points(get_config(arg), [_point("hca", s) for s in lengths], blocks, names, (steps,))

    points = crossed(lengths, "closed_form", "computed", "static", "dynamic")
    points += crossed((middle,), *_FREE, steps=0) + crossed(long, "closed_form", blocks=(256, 1024))
    points += [hca(s, "closed_form", **{"attention.heads_per_call": n}) for s in long for n in (GROUP, 1)]
    points += [_point("csa", s, **{"attention.csa_schedule": name}) for s in lengths for name in ("dynamic", "hybrid")]
    points += [_point("sliding", middle, **{"attention.backend": b}) for b in _BACKENDS]
    if quick:
        return [*points, hca(lengths[0], "captured")]
    points += [hca(262144, "closed_form", **{"attention.heads_per_call": n}) for n in (GROUP, 1)]
    layer = {"aot.what": ("layer",)}
    points += [_point("sliding", 16384, **layer, **{"attention.backend": b}) for b in _BACKENDS]
    grouped = layer | {"attention.heads_at_once": GROUP}
    points += [_point(kind, s, **grouped) for kind in ("hca", "csa") for s in (16384, 32768, *long)]
    # Last, for it takes longest, and from 32,768 on more host memory than most machines have.
    return points + [hca(s, "captured") for s in lengths]


def report_aot(rows: list[dict]) -> list[str]:
    """Each claim beside what was found in these rows; what was not compiled is left out."""
    found = {}
    for row in rows:
        if row["phase"] == "forward_backward":
            found[_key(row)] = row
    hca = {key: row for key, row in found.items() if key[:2] == ("op", "hca") and key[4:] == (512, 3, 0)}
    lines = ["claim of a seed -> found"]
    for part in (_memory, _scalar_memory, _captured, _compile_times):
        lines += part({(key.schedule, key.seq_len): row for key, row in hca.items()})
    lines += _steps(found) + _dense(found) + _groups(found) + _layers(found)
    return [*lines, "  step times -> need the hardware, and are not claimed here"]


def _memory(hca: dict) -> list[str]:
    both = [(s, hca[name, s], hca["dynamic", s]) for name, s in hca if name == "static" and ("dynamic", s) in hca]
    lines = []
    for seq_len, static, dynamic in both:
        if static["status"] == dynamic["status"] == "ok" and seq_len >= 65536:
            temp, peak = (1 - static[part] / dynamic[part] for part in ("temp_bytes", "peak_bytes"))
            claim = "  static saves up to 48 % of dynamic's memory at 65,536"
            lines.append(f"{claim} -> {temp:.0%} of the temporaries, {peak:.0%} of the peak at {seq_len:,}")
    return lines


def _scalar_memory(hca: dict) -> list[str]:
    claim = "  static compiles at 131,072, where dynamic runs out of SMEM"
    return [
        f"{claim} -> at {seq_len:,} dynamic is {row['status']}, static {hca['static', seq_len]['status']}"
        for (name, seq_len), row in hca.items()
        if name == "dynamic" and row["status"] != "ok" and ("static", seq_len) in hca
    ]


def _captured(hca: dict) -> list[str]:
    lines = []
    for (name, seq_len), row in hca.items():
        if name == "captured":
            found = row["status"]
            if found == "ok":
                others = {other: hca[other, seq_len] for other in _FREE if (other, seq_len) in hca}
                ratios = {other: row["compile_seconds"] / quick["compile_seconds"] for other, quick in others.items()}
                found = ", ".join(f"{ratio:.0f}x {other}" for other, ratio in ratios.items())
            lines.append(
                f"  captured compiles 68x (32,768), 264x (65,536) longer than static -> {found} at {seq_len:,}"
            )
    return lines


def _compile_times(hca: dict) -> list[str]:
    """Schedule, lowering and compiling together."""
    lines = []
    for name in _FREE:
        seconds = {
            s: _compile_seconds(row) for (other, s), row in hca.items() if other == name and row["status"] == "ok"
        }
        if seconds:
            text = ", ".join(f"{value:.1f} s at {seq_len:,}" for seq_len, value in seconds.items())
            lines.append(f"  compiles in under 5 s at every length -> {name}, schedule and lowering included: {text}")
    return lines


def _steps(found: dict) -> list[str]:
    lines = []
    for key, row in found.items():
        ring = found.get(key._replace(steps=3))
        if key.steps == 0 and key.what == "op" and ring and row["status"] == ring["status"] == "ok":
            ratio = row["temp_bytes"] / ring["temp_bytes"]
            line = f"  dq_reduction_steps=3 saves memory -> {key.schedule}: unset takes {ratio:.1f}x the temporaries"
            lines.append(f"{line} at {key.seq_len:,}")
    return lines


def _dense(found: dict) -> list[str]:
    of_backend = {(row["what"], row["seq_len"], row["backend"]): row for row in found.values()}
    return [
        f"  dense runs out of memory at 16,384 where splash fits -> {what} at {seq_len:,}: dense {row['status']}, "
        f"splash {of_backend[what, seq_len, 'splash']['status']}"
        for (what, seq_len, backend), row in of_backend.items()
        if backend == "dot_product" and (what, seq_len, "splash") in of_backend
    ]


def _groups(found: dict) -> list[str]:
    lines = []
    for key, row in found.items():
        whole = found.get(key._replace(schedule="static", block=512, heads=0))
        if key.what == "op" and key.heads and row["status"] == "ok":
            line = (
                f"  beyond the seeds: {key.heads} heads a call take {row['temp_bytes'] * _MIB:,.0f} MiB of temporaries"
            )
            if whole and whole["status"] == "ok":
                line += f", {row['temp_bytes'] / whole['temp_bytes']:.2f}x those of static with all"
            lines.append(f"{line} at {key.seq_len:,}")
    return lines


def _layers(found: dict) -> list[str]:
    lines = []
    for key, row in found.items():
        if key.what == "layer" and row["status"] == "ok" and row["backend"] == "splash":
            temp, seconds = row["temp_bytes"] * _MIB, row["compile_seconds"]
            line = f"  {key.visibility} layer at {key.seq_len:,}: {temp:,.0f} MiB of temporaries"
            line += f", compiled in {seconds:.1f} s"
            peer = _PEER.get((key.visibility, key.seq_len))
            if peer:
                line += f", {temp / peer[0]:.2f}x and {seconds / peer[1]:.2f}x those of MaxText 0.2.5"
            lines.append(line)
    return lines


_FREE = ("static", "closed_form", "computed")  # schedules that leave the choice of dq_reduction_steps
_BACKENDS = ("dot_product", "splash")


def _point(kind: str, seq_len: int, **others) -> experiment.Overrides:
    if others.get("attention.backend") == "dot_product":
        others["attention.dq_reduction_steps"] = 0
    return {"model.layers": (kind,), "data.seq_len": seq_len, **others}


class _Key(NamedTuple):
    """What tells rows apart: program, visibility, and effective settings."""

    what: str
    visibility: str
    schedule: str
    seq_len: int
    block: int
    steps: int
    heads: int


def _key(row: dict) -> _Key:
    effective = row.get("effective", {})
    numbers = (effective.get(name, 0) for name in ("block_q", "dq_reduction_steps"))
    per_call = effective.get("heads_per_call", 0)
    heads = 0 if per_call == row.get("heads") else per_call  # all of them, which older rows recorded as 0
    return _Key(row["what"], row["visibility"], row["schedule"], row["seq_len"], *numbers, heads)


def _compile_seconds(row: dict) -> float:
    return row["schedule_seconds"] + row["lower_seconds"] + row["compile_seconds"]
