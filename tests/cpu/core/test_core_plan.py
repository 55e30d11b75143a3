from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.cells import Cell
from pipeline.config import ExperimentConfig
from pipeline.plan import plan
from pipeline.todo import Item, by_case, split

CONFIG = ExperimentConfig.model_validate(
    {
        "name": "t",
        "accuracy": {"implementations": ["eager", "turbopair.exact"], "crops": [16], "head_dims": [16], "slices": 2,
                     "families": ["normal", "masked"], "cases": 3},
        "determinism": {"implementations": ["eager"], "crops": [16], "head_dims": [8], "cases": 1},
        "ablation": {"precisions": ["plain", "paper"], "crops": [16], "head_dims": [16], "repeats": 3},
        "step_time": {"backends": ["pytorch"], "crops": [384], "nodes": 2, "ranks_per_node": 8},
    }
)  # fmt: skip
# A changed id orphans every record that exists. If this list must change, raise records.SCHEMA_VERSION in the same commit.
GOLDEN = Path(__file__).with_name("golden_ids.txt").read_text().split()


def test_ids_do_not_change_by_accident() -> None:
    assert [cell.id for cell in plan(CONFIG)] == GOLDEN


def test_a_step_is_planned_for_each_number_of_ranks() -> None:
    section = {"backends": ["pytorch", "lma"], "crops": [384], "nodes": 2, "ranks_per_node": [1, 4]}
    cells = plan(ExperimentConfig.model_validate({"name": "t", "step_time": section}))
    assert [(cell.implementation, cell.ranks) for cell in cells] == [("pytorch", 2), ("lma", 2), ("pytorch", 8), ("lma", 8)]
    for wrong, text in (([2, 2], "given twice"), ([], "at least 1"), (0, "greater than or equal to 1")):
        with pytest.raises(ValidationError, match=text):
            ExperimentConfig.model_validate({"name": "t", "step_time": {**section, "ranks_per_node": wrong}})


def test_the_plan_is_a_pure_function_in_a_fixed_order() -> None:
    assert plan(CONFIG) == plan(CONFIG)
    assert [cell.experiment for cell in plan(CONFIG, ["ablation", "accuracy"])] == ["accuracy"] * 6 + ["ablation"] * 2


def test_cases_are_dealt_to_families_and_neighbours_share_inputs() -> None:
    cells = plan(CONFIG, ["accuracy"])
    assert [(cell.family, cell.seed, cell.implementation) for cell in cells] == [
        ("normal", 0, "eager"), ("normal", 0, "turbopair.exact"), ("masked", 0, "eager"), ("masked", 0, "turbopair.exact"),
        ("normal", 1, "eager"), ("normal", 1, "turbopair.exact"),
    ]  # fmt: skip
    groups = by_case(Item(cell=cell) for cell in cells)
    assert [len(group) for group in groups] == [2, 2, 2]


def test_a_case_is_drawn_once_for_the_experiments_without_times() -> None:
    section = {"implementations": ["eager", "sdpa"], "crops": [16], "head_dims": [16], "cases": 2}
    sections = {"accuracy": section, "determinism": section, "kernel_time": {**section, "cases": 1}}
    groups = by_case(Item(cell=cell) for cell in plan(ExperimentConfig.model_validate({"name": "t", **sections})))
    assert [[(item.cell.experiment, item.cell.seed) for item in group] for group in groups] == [
        [("accuracy", 0)] * 2 + [("determinism", 0)] * 2,
        [("accuracy", 1)] * 2 + [("determinism", 1)] * 2,
        [("kernel_time", 0)] * 2,
    ]


@pytest.mark.parametrize(("size", "expected"), [(1, [2, 2, 2]), (3, [4, 2]), (100, [6])])
def test_parts_do_not_cut_a_case(size: int, expected: list[int]) -> None:
    assert [len(part) for part in split([Item(cell=cell) for cell in plan(CONFIG, ["accuracy"])], size)] == expected


def test_every_field_is_in_the_id() -> None:
    base = plan(CONFIG)[0]
    changes = {
        "experiment": "determinism", "implementation": "sdpa", "n": 17, "slices": 3, "heads": 5, "head_dim": 17, "family": "sharp",
        "seed": 9, "dtype": "fp32", "bias_dtype": "fp32", "masked": True, "options": {"calls": 5},
    }  # fmt: skip
    others = {"operator", "channels", "direction", "weight_dtype"}  # of the other operators, below
    assert set(changes) | others == set(Cell.model_fields)
    ids = {Cell.model_validate({**base.model_dump(), key: value}).id for key, value in changes.items()}
    assert len(ids | {base.id}) == len(changes) + 1
    common = {"experiment": "accuracy", "implementation": "eager", "n": 16, "family": "normal", "seed": 0}
    product = {**common, "operator": "triangle_multiplication", "channels": 32, "direction": "outgoing", "weight_dtype": "fp32"}
    module = {**common, "operator": "attention_module", "channels": 32, "heads": 2, "head_dim": 16}
    variants = [product, {**product, "channels": 64}, {**product, "direction": "incoming"}, {**product, "weight_dtype": "bf16"}, module]
    assert len({Cell.model_validate(fields).id for fields in variants}) == len(variants)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slices": None}, "a cell of triangle_attention needs slices"),
        ({"channels": 128}, "a cell of triangle_attention has no channels; it has slices, heads, head_dim, bias_dtype"),
        ({"operator": "triangle_multiplication"}, "needs channels, direction, weight_dtype"),
    ],
)
def test_a_cell_has_the_sizes_of_its_operator(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Cell.model_validate({**plan(CONFIG)[0].model_dump(), **change})


def test_a_cell_survives_json_with_the_types_of_its_options() -> None:
    cell = plan(CONFIG)[0].model_copy(update={"options": {"a": 1, "b": 1.0, "c": True, "d": "x"}})
    again = Cell.model_validate_json(cell.model_dump_json())
    assert again == cell
    assert again.id == cell.id
    assert [type(value) for value in again.options.values()] == [int, float, bool, str]


def test_a_cell_refuses_what_is_no_file_name() -> None:
    base = plan(CONFIG)[0].model_dump()
    with pytest.raises(ValidationError):
        Cell.model_validate({**base, "implementation": "../up"})
