"""The report sets each claim beside what the rows say, and says nothing of what was not compiled."""

import pathlib

from analysis import aot, frame
from experiments import seed_claims
from research.runs import files

RESULTS = pathlib.Path(__file__).parents[2] / "analysis" / "results" / "seed_claims.jsonl"


def row(schedule, seq_len=65536, temp=100, status="ok", steps=3, heads=0, compile_seconds=2.0, **others):
    settings = {"block_q": 512, "dq_reduction_steps": steps, "heads_per_call": heads}
    common = {
        "what": "op",
        "visibility": "hca",
        "backend": "splash",
        "phase": "forward_backward",
        "requested": settings,
    }
    numbers = {"temp_bytes": temp, "peak_bytes": 2 * temp, "compile_seconds": compile_seconds}
    seconds = {"schedule_seconds": 1.0, "lower_seconds": 0.5}
    found = numbers if status == "ok" else {}
    return {**common, **found, **seconds, "schedule": schedule, "seq_len": seq_len, "status": status, **others}


def verdicts(rows):
    """The verdict of each claim by the beginning of its text."""
    return {" ".join(claim.text.split()[:2]): claim.told for claim in seed_claims.claims(rows)}


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
        row("dynamic", temp=1, phase="forward"),
    ]
    lines = [line.strip() for line in seed_claims.report(rows)]
    assert "001: static saves up to 48 % of dynamic's peak memory at 65,536 -> partly, 1 of 2" in lines
    assert "25 % of the peak, 25 % of the temporaries at 65,536" in lines
    assert "at 131,072 static is ok, dynamic out of SMEM" in lines
    assert "10x static, 10x closed_form at 65,536" in lines
    assert "closed_form: unset takes 10.0x the temporaries at 65,536" in lines
    assert "8 a call: 6 MiB of temporaries, 104857.60x those of static with all at 65,536" in lines
    assert "static, schedule and lowering included: 3.5 s at 65,536, 3.5 s at 131,072" in lines
    assert verdicts(rows) == {
        "static saves": "partly, 1 of 2",
        "static compiles": "confirmed, 2 of 2",
        "captured takes": "refuted, 0 of 1",
        "dq_reduction_steps=3 saves": "confirmed, 1 of 1",
        "splash's steps": "not measurable here",
        "8 heads": "refuted, 0 of 1",
    }


def test_a_claim_is_tested_only_where_it_speaks_of():
    small = [row("static", 4096), row("dynamic", 4096), row("captured", 4096), row("captured", 65536, status="killed")]
    dense = [row("", 2048, visibility="sliding", backend="dot_product"), row("closed_form", 2048, visibility="sliding")]
    found = verdicts([*small, *dense])
    assert found["captured takes"] == found["dense attention"] == "not measurable here"
    assert "static saves" not in found


def test_layers_stand_beside_the_peers():
    layer = row("closed_form", temp=21932 * 2**20, compile_seconds=39.0, what="layer")
    dense = row("", 16384, status="out of HBM", what="layer", visibility="sliding", backend="dot_product")
    splash = row("closed_form", 16384, what="layer", visibility="sliding")
    lines = [line.strip() for line in seed_claims.report([layer, dense, splash])]
    assert "21,932.0 MiB at 65,536, 0.50x MaxText's" in lines
    assert "39.0 s at 65,536, 0.10x MaxText's" in lines
    assert "layer at 16,384: dense out of HBM, splash ok" in lines
    assert "000: dense attention runs out of memory at 16,384, where splash fits -> confirmed, 1 of 1" in lines


def test_report_of_little_says_little():
    found = seed_claims.claims([row("static")])
    assert [claim.text.split()[0] for claim in found] == ["static", "splash's"]


def test_frames_keep_failures_and_name_what_took_effect(tmp_path):
    rows = files.read_lines(RESULTS)
    table = frame.aot_table(rows)
    assert len(table) == len(rows)
    assert {"ok", "out of SMEM"} <= set(table["status"])
    fits = table[table["status"] == "ok"]
    assert fits["useful_fraction"].between(0, 1).all()
    assert {"op hca closed_form 512x512 dq 3", "op hca closed_form 512x512 dq 3 heads 8"} <= set(table["setting"])
    aot.draw(rows, tmp_path / "aot.png")
    assert (tmp_path / "aot.png").stat().st_size > 10_000
