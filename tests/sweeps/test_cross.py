"""The cross is whole where there is a choice, and has no two points that cannot differ."""

import pytest

from research.attention.backends.splash import schedules
from research.settings.config import base_config
from research.sweeps import cross


def crossed(case, blocks=(128,), **others):
    return cross.points(base_config(), [case], blocks, **others)  # 512 tokens


def told(points):
    """Schedule, block and steps of each point."""
    fields = ("schedule", "block_q", "dq_reduction_steps")
    return [tuple(point[f"attention.{name}"] for name in fields) for point in points]


def test_steps_are_left_out_where_they_are_no_choice():
    hca = {"model.layers": ("hca",)}
    points = crossed(hca, blocks=(128, 256), names=("static", "dynamic"))
    few = [("static", 256, 0), ("dynamic", 128, 0), ("dynamic", 256, 0)]
    assert told(points) == [("static", 128, 0), ("static", 128, 3), *few]
    assert told(crossed(hca, (256,), names=("static",), fewest_blocks=1))[1] == ("static", 256, 3)
    assert told(crossed(hca, names=("dynamic",), steps=(3,))) == [("dynamic", 128, 3)]


@pytest.mark.parametrize(
    ("case", "field", "kinds"),
    [
        ({"model.layers": ("sliding", "hca")}, "schedule", ("sliding", "hca")),
        ({"model.layers": ("csa",)}, "csa_schedule", ("csa",)),
        ({"model.layers": ("sliding", "csa")}, "schedule", ("sliding",)),
        ({"model.layers": ("csa",), "attention.csa_stage": "dense"}, "csa_schedule", ("hca",)),
        ({"model.layers": ("sliding", "csa"), "attention.csa_stage": "dense"}, "schedule", ("sliding", "hca")),
    ],
)
def test_schedules_that_cannot_express_the_layers_are_left_out(case, field, kinds):
    names = {point[f"attention.{field}"] for point in crossed(case)}
    assert names == {name for name in schedules.TABLE if all(name in schedules.expressing(kind) for kind in kinds)}


def test_layers_that_see_all_entries_get_the_same_schedule_as_the_others():
    dense = {"model.layers": ("sliding", "csa"), "attention.csa_stage": "dense"}
    assert all(point["attention.schedule"] == point["attention.csa_schedule"] for point in crossed(dense))
    assert not any("attention.csa_schedule" in point for point in crossed({"model.layers": ("sliding", "csa")}))


def test_cases_come_first_and_each_has_the_cross():
    cases = [{"model.layers": ("hca",), "seed": seed} for seed in (0, 1)]
    points = cross.points(base_config(), cases, (128, (128, 256)), ("static",), unscheduled=True)
    assert [point["attention.backend"] for point in points] == 2 * ["dot_product", "blockwise", *3 * ["splash"]]
    assert [list(point)[:3] for point in points] == 10 * [["model.layers", "seed", "attention.backend"]]
    assert [(p["attention.block_q"], p["attention.block_kv"]) for p in points[2:5]] == [*2 * [(128, 128)], (128, 256)]


def test_splash_is_not_named_where_the_config_has_it_nor_are_sizes_left_to_the_backend():
    config = base_config()
    config.attention.backend = "splash"
    points = cross.points(config, [{"model.layers": ("hca",)}], (0,), ("static",))
    names = ["model.layers", "attention.schedule", "attention.dq_reduction_steps"]
    assert [list(point) for point in points] == [names, names]
