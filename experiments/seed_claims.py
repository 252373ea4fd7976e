"""What do the seeds' claims come to, by the TPU's own compiler, and how far can they be beaten?

    python launch/aot.py --config=experiments/seed_claims.py            # an hour on two cores, resumable
    python launch/aot.py --config=experiments/seed_claims.py:demo      # small sizes, a few minutes

DeepSeek-V4-Flash's attention (64 heads of 512, bfloat16, window 128), compiled ahead of time for a v5p: HCA under every
schedule from 4,096 tokens to 131,072, CSA, sliding dense against splash, what groups of heads save, and whole layers,
beside those of another implementation. The last lines set each claim beside what was found, with a verdict; the
notebook `analysis/notebooks/seed_claims.ipynb` draws them. Step times need a TPU, and are not among them.

One file, for an experiment is one: its points, and claim by claim what their rows say.
"""

import math
from typing import Any, NamedTuple

import ml_collections

from analysis.claims import Claim, Value
from research.settings.config import base_config
from research.sweeps import cross, experiment

ARGS = ("", "demo")
HEADLINE = ("compile_seconds", "temp_bytes")
GROUP = 8  # heads of a call: those of one group of the output projection

_MIB, _GIB = 2**-20, 2**-30
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
    """'' has the sizes of DeepSeek-V4-Flash, 'demo' an eighth of the heads, a quarter as wide."""
    experiment.check_arg(arg, ARGS)
    config = base_config()
    config.model.layers = ("hca",)
    config.model.dtype = "bfloat16"
    config.attention.backend = "splash"
    config.attention.dq_reduction_steps = 3
    config.attention.rope_width = 64
    config.data.seq_len = 2048
    config.data.batch_size = 1
    if arg == "demo":
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
    demo = arg == "demo"
    lengths = (2048, 4096) if demo else (4096, 8192, 16384, 32768, 65536, 131072)
    long, middle = lengths[-2:], lengths[-4 if not demo else 0]

    def hca(seq_len: int, schedule: str, **others: Any) -> experiment.Overrides:
        strategy = {"attention.schedule": schedule, "attention.dq_reduction_steps": 3}
        return _point("hca", seq_len, **strategy, **others)

    def crossed(
        lengths: tuple[int, ...], *names: str, blocks: tuple[int, ...] = (0,), steps: int = 3
    ) -> list[experiment.Overrides]:
        return cross.points(get_config(arg), [_point("hca", s) for s in lengths], blocks, names, (steps,))

    points = crossed(lengths, "closed_form", "computed", "static", "dynamic")
    points += crossed((middle,), *_FREE, steps=0) + crossed(long, "closed_form", blocks=(256, 1024))
    points += [hca(s, "closed_form", **{"attention.heads_per_call": n}) for s in long for n in (GROUP, 1)]
    points += [_point("csa", s, **{"attention.csa_schedule": name}) for s in lengths for name in ("dynamic", "hybrid")]
    points += [_point("sliding", middle, **{"attention.backend": b}) for b in _BACKENDS]
    if demo:
        return [*points, hca(lengths[0], "captured")]
    points += [hca(262144, "closed_form", **{"attention.heads_per_call": n}) for n in (GROUP, 1)]
    layer = {"aot.what": ("layer",)}
    points += [_point("sliding", 16384, **layer, **{"attention.backend": b}) for b in _BACKENDS]
    grouped = layer | {"attention.heads_at_once": GROUP}
    points += [_point(kind, s, **grouped) for kind in ("hca", "csa") for s in (16384, 32768, *long)]
    # Last, for it takes longest, and from 32,768 on more host memory than most machines have.
    return points + [hca(s, "captured") for s in lengths]


def report(rows: list[dict]) -> list[str]:
    """Each claim with its verdict, and what was found; claims of which nothing was compiled are left out."""
    told = [line for claim in claims(rows) for line in claim.lines]
    return ["claim -> verdict, how many of its tests hold; and what was found", *told]


def claims(rows: list[dict]) -> list[Claim]:
    """The claims of which these rows say something: the seeds', then what goes beyond them.

    A test is what a claim says of one place that it names, where that was compiled; `Claim.verdict` counts them.
    """
    found = {_key(row): row for row in rows if row["phase"] == "forward_backward"}
    hca = {}
    for key, row in found.items():
        if key == _Key("op", "hca", key.schedule, key.seq_len):
            hca.setdefault(key.schedule, {})[key.seq_len] = row
    seeds = [_dense(found), _memory(hca), _scalar_memory(hca), _captured(hca), _compile_times(hca), _steps(found)]
    layers = [_layer(found, kind, quantity) for quantity in _QUANTITIES for kind in ("hca", "csa")]
    return [claim for claim in (*seeds, _step_times(), _groups(found), *layers) if claim.found]


def _dense(found: dict) -> Claim:
    at, values, tests, lines = 16384, [], [], []
    rows = {(row["what"], row["backend"]): row for key, row in found.items() if key.visibility == "sliding"}
    for (what, backend), row in rows.items():
        name, look = ("dense", "dense") if backend == "dot_product" else ("splash", row["schedule"])
        values.append(_value(f"{what}, {name}", look, row, row.get("peak_bytes", math.nan) * _GIB))
        if backend == "dot_product" and (what, "splash") in rows:
            splash = rows[what, "splash"]["status"]
            tests += [row["status"] == "out of HBM" and splash == "ok"] if row["seq_len"] == at else []
            lines.append(f"{what} at {row['seq_len']:,}: dense {row['status']}, splash {splash}")
    text = "dense attention runs out of memory at 16,384, where splash fits"
    return Claim("000", text, "peak memory, GiB", values, tests, lines, bars=True)


def _memory(hca: dict) -> Claim:
    at, claimed = 65536, 48
    values, tests, lines = [Value("claimed", "claimed", at, claimed)], [], []
    pair = [hca.get(name, {}).get(at, {}) for name in ("static", "dynamic")]
    if all(row.get("status") == "ok" for row in pair):
        peak, temp = (100 * (1 - pair[0][part] / pair[1][part]) for part in ("peak_bytes", "temp_bytes"))
        values += [Value("found, peak", "static", at, peak), Value("found, temporaries", "static", at, temp)]
        tests = [peak > 0, peak >= claimed]
        lines = [f"{peak:.0f} % of the peak, {temp:.0f} % of the temporaries at {at:,}"]
    text = "static saves up to 48 % of dynamic's peak memory at 65,536"
    return Claim("001", text, "saved of dynamic's memory, %", values, tests, lines, bars=True)


def _scalar_memory(hca: dict) -> Claim:
    at = 131072
    values = [
        _value(name, name, row, row.get("peak_bytes", math.nan) * _GIB)
        for name in ("static", "dynamic")
        for row in hca.get(name, {}).values()
    ]
    static, dynamic = (hca.get(name, {}).get(at, {}).get("status") for name in ("static", "dynamic"))
    both = bool(static and dynamic)
    tests = [static == "ok", dynamic == "out of SMEM"] if both else []
    lines = [f"at {at:,} static is {static}, dynamic {dynamic}"] if both else []
    text = "static compiles at 131,072, where dynamic runs out of SMEM"
    return Claim("001", text, "peak memory, GiB", values, tests, lines)


def _captured(hca: dict) -> Claim:
    claimed = {32768: 68, 65536: 264}
    values = [Value(f"claimed {ratio}", "claimed", seq_len, ratio) for seq_len, ratio in claimed.items()]
    tests, lines = [], []
    for seq_len, row in sorted(hca.get("captured", {}).items()):
        others = {name: hca[name][seq_len] for name in _FREE if seq_len in hca.get(name, {})}
        if row["status"] != "ok":
            values.append(_value("captured", "captured", row, math.nan))
            lines.append(f"{row['status']} at {seq_len:,}")
        elif others:
            ratios = {name: row["compile_seconds"] / other["compile_seconds"] for name, other in others.items()}
            lines.append(", ".join(f"{ratio:.0f}x {name}" for name, ratio in ratios.items()) + f" at {seq_len:,}")
            if "static" in ratios:
                values.append(_value("captured", "captured", row, ratios["static"]))
                tests += [ratios["static"] >= claimed[seq_len]] if seq_len in claimed else []
    text = "captured takes 68x static's time to compile at 32,768, 264x at 65,536"
    return Claim("001", text, "compile time, of static's", values, tests, lines)


def _compile_times(hca: dict) -> Claim:
    """Schedule, lowering and compiling together."""
    limit = 5
    seconds = {
        name: {n: _compile_seconds(row) for n, row in hca[name].items() if row["status"] == "ok"}
        for name in _FREE
        if name in hca
    }
    values = [Value(name, name, *pair) for name, found in seconds.items() for pair in found.items()]
    lengths = sorted({value.tokens for value in values})
    values += [Value(f"claimed {limit}", "claimed", seq_len, limit) for seq_len in lengths]
    tests = [found < limit for found in seconds.get("static", {}).values()]
    lines = [
        f"{name}, schedule and lowering included: " + ", ".join(f"{x:.1f} s at {n:,}" for n, x in found.items())
        for name, found in seconds.items()
    ]
    return Claim("001", "static compiles in under 5 s at every length", "time to compile, s", values, tests, lines)


def _steps(found: dict) -> Claim:
    values, tests, lines = [], [], []
    for key, row in found.items():
        ring = found.get(key._replace(steps=3))
        if key.steps == 0 and key.what == "op" and ring and row["status"] == ring["status"] == "ok":
            for name, one in (("3", ring), ("unset", row)):
                values.append(_value(f"{key.schedule}, {name}", key.schedule, one, one["temp_bytes"] * _GIB))
            ratio = row["temp_bytes"] / ring["temp_bytes"]
            tests.append(ratio > 1)
            lines.append(f"{key.schedule}: unset takes {ratio:.1f}x the temporaries at {key.seq_len:,}")
    return Claim("001", "dq_reduction_steps=3 saves memory", "temporaries, GiB", values, tests, lines, bars=True)


def _step_times() -> Claim:
    over_dynamic = {16384: 1.09, 32768: 1.20, 65536: 1.48}
    values = [Value("dense, 512", "claimed", 512, 0.991 / 0.637)]  # seconds of a step
    values += [Value(f"dynamic, {seq_len:,}", "claimed", seq_len, ratio) for seq_len, ratio in over_dynamic.items()]
    text = "splash's steps take less time than dense ones, static's than dynamic's"
    found = ["step times need the hardware"]
    return Claim("000, 001", text, "claimed: times as fast as", values, [], found, bars=True)


def _groups(found: dict) -> Claim:
    values, tests, lines = [], [], []
    whole = {key.seq_len: row for key, row in found.items() if key == _Key("op", "hca", "static", key.seq_len)}
    whole = {seq_len: row for seq_len, row in whole.items() if row["status"] == "ok"}
    for key, row in found.items():
        if key.what == "op" and key.heads and row["status"] == "ok":
            values.append(_value(f"{key.heads} a call", key.schedule, row, row["temp_bytes"] * _GIB))
            line = f"{key.heads} a call: {row['temp_bytes'] * _MIB:,.0f} MiB of temporaries"
            if key.seq_len in whole:
                ratio = row["temp_bytes"] / whole[key.seq_len]["temp_bytes"]
                tests.append(ratio < 1)
                line += f", {ratio:.2f}x those of static with all"
            lines.append(f"{line} at {key.seq_len:,}")
    shown = {value.tokens for value in values}
    values += [_value("static, all", "static", row, row["temp_bytes"] * _GIB) for n, row in whole.items() if n in shown]
    text = "8 heads a call, or 1, take less memory than all at once"
    return Claim("beyond", text, "temporaries, GiB", values, tests, lines)


class _Quantity(NamedTuple):
    """What of a layer is compared: a field of its row, its unit and factor, its place in `_PEER`, and the claim."""

    field: str
    name: str
    unit: str
    factor: float
    place: int
    claim: str


_QUANTITIES = (
    _Quantity("temp_bytes", "temporaries", "MiB", _MIB, 0, "takes less memory"),
    _Quantity("compile_seconds", "time to compile", "s", 1, 1, "compiles sooner"),
)


def _layer(found: dict, kind: str, quantity: _Quantity) -> Claim:
    values, tests, lines = [], [], []
    for key, row in found.items():
        if key.what == "layer" and key.visibility == kind and row["status"] == "ok":
            number = row[quantity.field] * quantity.factor
            values.append(_value("ours", key.schedule, row, number))
            line = f"{number:,.1f} {quantity.unit} at {key.seq_len:,}"
            if (kind, key.seq_len) in _PEER:
                peer = _PEER[kind, key.seq_len][quantity.place]
                values.append(Value("MaxText", "peer", key.seq_len, peer))
                tests.append(number < peer)
                line += f", {number / peer:.2f}x MaxText's"
            lines.append(line)
    text = f"the {kind.upper()} layer {quantity.claim} than MaxText 0.2.5's"
    return Claim("beyond", text, f"{quantity.name}, {quantity.unit}", values, tests, lines)


def _value(name: str, look: str, row: dict, number: float) -> Value:
    return Value(name, look, row["seq_len"], number, row["status"])


_FREE = ("static", "closed_form", "computed")  # schedules that leave the choice of dq_reduction_steps
_BACKENDS = ("dot_product", "splash")


def _point(kind: str, seq_len: int, **others: Any) -> experiment.Overrides:
    if others.get("attention.backend") == "dot_product":
        others["attention.dq_reduction_steps"] = 0
    return {"model.layers": (kind,), "data.seq_len": seq_len, **others}


class _Key(NamedTuple):
    """What tells rows apart: program, visibility, and settings in effect, or asked for where nothing took effect."""

    what: str
    visibility: str
    schedule: str
    seq_len: int
    block: int = 512
    steps: int = 3
    heads: int = 0


def _key(row: dict) -> _Key:
    settings = row["requested"] | row.get("effective", {})
    per_call = settings["heads_per_call"]
    heads = 0 if per_call == row.get("heads") else per_call  # all of them, which older rows recorded as 0
    numbers = settings["block_q"] or _Key._field_defaults["block"], settings["dq_reduction_steps"], heads
    return _Key(row["what"], row["visibility"], row["schedule"], row["seq_len"], *numbers)


def _compile_seconds(row: dict) -> float:
    return row["schedule_seconds"] + row["lower_seconds"] + row["compile_seconds"]


REPORTS = {"aot": report}
