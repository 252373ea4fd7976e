"""What all measures share: programs, their rows, and the file that keeps them."""

import pytest

from research.measure import pipeline, targets
from research.measure.pipeline import Planned
from research.measure.program import Program
from research.runs import files
from research.settings.config import Settings

SETTINGS = Settings().replace(
    model={"layers": ("sliding", "csa", "hca")}, attention={"backend": "splash"}, aot={"what": ("op", "layer", "step")}
)


def versioned(measure):
    """The module that asks for versions, of a compilation those of its target."""
    return targets if measure is pipeline.get("aot") else measure


@pytest.fixture(params=pipeline.MEASURES)
def measure(request, monkeypatch):
    """Each of them, with what it measures and its versions replaced."""
    found = pipeline.get(request.param)
    monkeypatch.setattr(versioned(found), "versions", lambda *packages: dict.fromkeys(packages, "1"))
    return found


def planned(measure):
    return [Planned(program, {"n": n}, 1.0) for n, program in enumerate(measure.programs(SETTINGS, "tpu"))]


def rows_of(measure, program):
    return [measure.identify(program) | {"phase": phase, "status": "ok"} for phase in measure.PHASES[program.what]]


def test_programs_survive_as_text(measure):
    for program, *_ in planned(measure):
        assert Program.from_json(program.to_json()) == program


def test_programs_of_a_config_are_distinct_and_have_rows(measure):
    programs = [program for program, *_ in planned(measure)]
    assert len(set(programs)) == len({pipeline.key(program) for program in programs}) == len(programs) > 2
    assert all(measure.PHASES[program.what] for program in programs)
    assert all({"versions", "seq_len"} <= measure.identify(program).keys() for program in programs)


def test_what_does_not_matter_makes_no_other_program(measure):
    others = SETTINGS.replace(run={"root": "elsewhere"}, wandb={"mode": "offline"}, profile={"steps": 3})
    assert measure.programs(others, "tpu") == measure.programs(SETTINGS, "tpu")


def test_rows_that_stand_there_are_not_measured_again(measure, monkeypatch, tmp_path):
    results, asked, plan = tmp_path / "results.jsonl", [], planned(measure)[:2]

    def run(program, timeout):
        asked.append(program)
        yield from rows_of(measure, program)

    monkeypatch.setattr(pipeline, "run", run)
    [first] = pipeline.measured(plan[:1], results, {"platform": "cpu"})
    with open(results, "a", encoding="utf-8") as file:
        file.write('{"key": "half a row')  # a kill
    with pytest.warns(UserWarning, match="cut short"):
        found = list(pipeline.measured(plan, results, {}))
    assert asked == [plan[0].program, plan[1].program]
    assert found[0] == first
    assert {row["platform"] for row in first} == {"cpu"}
    assert [row["overrides"] for rows in found for row in rows] == [
        {"n": n} for n, rows in enumerate(found) for _ in rows
    ]
    assert files.read_lines(results) == [row for rows in found for row in rows]


def test_other_versions_and_a_wish_measure_again(measure, monkeypatch, tmp_path):
    results, asked, plan = tmp_path / "results.jsonl", [], planned(measure)[:1]
    monkeypatch.setattr(pipeline, "run", lambda program, _: asked.append(1) or rows_of(measure, program))
    list(pipeline.measured(plan, results, {}))
    monkeypatch.setattr(versioned(measure), "versions", lambda *packages: dict.fromkeys(packages, "2"))
    list(pipeline.measured(plan, results, {}))
    pipeline.forget(plan, results)
    list(pipeline.measured(plan, results, {}))
    assert len(asked) == 3
    phases = len(measure.PHASES[plan[0].program.what])
    assert len(files.read_lines(results)) == 2 * phases  # those of the other versions stay


def test_a_program_that_was_cut_short_is_measured_again(monkeypatch, tmp_path):
    measure = pipeline.get("bench")
    results, asked, plan = tmp_path / "results.jsonl", [], planned(measure)[:1]
    monkeypatch.setattr(pipeline, "run", lambda program, _: asked.append(1) or rows_of(measure, program))
    list(pipeline.measured(plan, results, {}))
    results.write_text(results.read_text().splitlines(keepends=True)[0])
    list(pipeline.measured(plan, results, {}))
    assert len(asked) == 2
