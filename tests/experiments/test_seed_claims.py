"""The report sets each claim beside what the rows say, and says nothing of what was not compiled."""

import pathlib

from analysis import aot, frame
from experiments import seed_claims
from research.runs import files

RESULTS = pathlib.Path(__file__).parents[2] / "analysis" / "results" / "seed_claims.jsonl"


def row(schedule, seq_len=65536, temp=100, status="ok", steps=3, heads=0, compile_seconds=2.0):
    effective = {"backend": "splash", "block_q": 512, "dq_reduction_steps": steps, "heads_per_call": heads}
    common = {"what": "op", "visibility": "hca", "backend": "splash", "phase": "forward_backward"}
    numbers = {"temp_bytes": temp, "peak_bytes": 2 * temp, "compile_seconds": compile_seconds}
    seconds = {"schedule_seconds": 1.0, "lower_seconds": 0.5}
    found = numbers if status == "ok" else {}
    return {**common, **found, **seconds, "schedule": schedule, "seq_len": seq_len, "status": status} | {
        "effective": effective
    }


def test_report_takes_each_claim_from_its_rows():
    rows = [
        row("static", temp=60),
        row("dynamic", temp=80),
        row("closed_form", temp=60),
        row("captured", compile_seconds=20.0),
        row("static", 131072),
        row("dynamic", 131072, status="out of SMEM"),
        row("closed_form", temp=600, steps=0),
        row("closed_form", temp=6 * 2**20, heads=8),
        {**row("dynamic", temp=1), "phase": "forward"},
    ]
    lines = [line.strip() for line in seed_claims.report_aot(rows)]
    assert (
        "static saves up to 48 % of dynamic's memory at 65,536 -> 25% of the temporaries, 25% of the peak at 65,536"
        in lines
    )
    assert any(line.endswith("at 131,072 dynamic is out of SMEM, static ok") for line in lines)
    assert any("10x static, 10x closed_form at 65,536" in line for line in lines)
    assert any(line.endswith("closed_form: unset takes 10.0x the temporaries at 65,536") for line in lines)
    assert any("8 heads a call take 6 MiB of temporaries" in line for line in lines)
    assert any(
        line.startswith("compiles in under 5 s") and "3.5 s at 65,536, 3.5 s at 131,072" in line for line in lines
    )


def test_layers_stand_beside_the_peers():
    layer = {**row("closed_form", 65536, temp=21932 * 2**20, compile_seconds=39.0), "what": "layer"}
    others = [
        {**row(schedule, 16384), "what": "layer", "visibility": "sliding", "backend": backend}
        for backend, schedule in (("dot_product", ""), ("splash", "closed_form"))
    ]
    others[0]["status"] = "out of HBM"
    lines = [line.strip() for line in seed_claims.report_aot([layer, *others])]
    assert any(
        "21,932 MiB of temporaries, compiled in 39.0 s, 0.50x and 0.10x those of MaxText" in line for line in lines
    )
    assert any(line.endswith("layer at 16,384: dense out of HBM, splash ok") for line in lines)


def test_report_of_little_says_little():
    assert len(seed_claims.report_aot([row("static")])) == 3


def test_frames_keep_failures_and_name_what_took_effect(tmp_path):
    rows = files.read_lines(RESULTS)
    table = frame.of_aot(rows)
    assert len(table) == len(rows)
    assert {"ok", "out of SMEM"} <= set(table["status"])
    fits = table[table["status"] == "ok"]
    assert fits["useful_fraction"].between(0, 1).all()
    assert {"op hca closed_form 512x512 dq 3", "op hca closed_form 512x512 dq 3 heads 8"} <= set(table["setting"])
    aot.draw(rows, tmp_path / "aot.png")
    assert (tmp_path / "aot.png").stat().st_size > 10_000
