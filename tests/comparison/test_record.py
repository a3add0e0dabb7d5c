"""Rows and comparisons as plain data: whose they are, how far they scatter, and which numbers are off."""

import json
import math

import pytest
import torch

from memopt.comparison.record import ALLOWED_RATIO, ALLOWED_UNITS, Comparison, Row, judged

EPS = torch.finfo(torch.float32).eps
FLOOR = ALLOWED_UNITS * EPS


def comparison(*rows):
    return Comparison("net", "training", "cpu", "float32", rows, {"batch": 2}, {"torch": "2"}, ("a note",))


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("eager", True),
        ("compile", True),
        ("compile:0.5", True),
        ("checkpoint", True),
        ("aten", False),
        ("inductor:8GB", False),
        ("eagerly", False),
        ("", False),
    ],
)
def test_whose_a_row_is(name, peer):
    assert Row(name).is_peer is peer


@pytest.mark.parametrize(
    ("seconds", "median", "spread"),
    [((), None, None), ((2.0,), 2.0, None), ((1.0, 3.0), 2.0, 0.5), ((5.0, 1.0, 2.0, 4.0, 3.0), 3.0, 1.0)],
)
def test_medians_and_half_the_distance_of_the_quartiles(seconds, median, spread):
    row = Row("aten", seconds=seconds)
    assert row.median == median and row.spread == spread


@pytest.mark.parametrize(
    ("usual", "found", "differs"),
    [
        (1e-3, ALLOWED_RATIO * 1e-3, False),
        (1e-3, ALLOWED_RATIO * 1.01e-3, True),
        (0.0, FLOOR, False),
        (0.0, 1.01 * FLOOR, True),
        (1e-12, FLOOR, False),
        (1e-3, math.nan, True),
        (1e-3, math.inf, True),
        (math.nan, 1e-3, True),
        (1e-3, None, False),
        (None, FLOOR, False),
    ],
)
@pytest.mark.parametrize("name", ["error", "gradient_error"])
def test_an_error_is_judged_by_eagers_own(usual, found, differs, name):
    rows = judged((Row("aten", **{name: found}), Row("eager", **{name: usual})), torch.float32)
    assert rows[0].differs is differs and [row.name for row in rows] == ["aten", "eager"]


def test_without_a_run_of_eager_rounding_alone_is_allowed():
    rows = (Row("eager", reason="out of memory", error=1.0), Row("aten", error=2 * FLOOR), Row("xla", error=FLOOR))
    assert [row.differs for row in judged(rows, torch.float32)] == [True, True, False]
    assert not judged(rows, torch.bfloat16)[1].differs and judged((), torch.float32) == ()


def test_a_comparison_differs_where_a_row_does():
    assert not comparison().differs and not comparison(Row("eager")).differs
    assert comparison(Row("eager"), Row("aten", differs=True)).differs


@pytest.mark.parametrize(("value", "text"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), (0.5, 0.5)])
def test_json_holds_what_is_no_number_as_text(value, text):
    text_of = comparison(Row("aten", error=value, gradient_error=value, notes=("é",))).to_json()
    (row,) = json.loads(text_of, parse_constant=pytest.fail)["rows"]
    assert row["error"] == row["gradient_error"] == text and row["notes"] == ["é"] and text_of.endswith("}\n")


@pytest.mark.parametrize("name", ["c.csv", "c", ".json", "c.json.gz"])
def test_a_name_of_another_kind_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(ValueError, match=r"must end in \.json, \.html or \.txt") as caught:
        comparison().save(tmp_path / name)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "C.JSON"
    path.write_text("old " * 1000)
    comparison(Row("aten")).save(path)
    assert json.loads(path.read_text())["rows"][0]["name"] == "aten" and [p.name for p in tmp_path.iterdir()] == [
        "C.JSON"
    ]
    with pytest.raises(OSError, match="absent"):
        comparison().save(tmp_path / "absent" / "c.json")
