"""Plots of a comparison: every row has its bar or its reason, every dot its name, and all is well formed."""

import itertools
import math
import xml.dom.minidom

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.comparison.plots import bars_svg, round_up, scatter_svg
from memopt.comparison.record import Row


def elements(svg, tag, kind=None):
    found = xml.dom.minidom.parseString(svg).getElementsByTagName(tag)
    return [item for item in found if kind is None or item.getAttribute("class") == kind]


def number(element, name):
    return float(element.getAttribute(name))


def words(value):
    return f"{value:g} <s>"


def rows(*seconds):
    return [Row(f"aten:{index}", seconds=() if value is None else (value,)) for index, value in enumerate(seconds)]


def median(row):
    return row.median


def test_bars_are_as_long_as_their_figures():
    svg = bars_svg(rows(1.0, 4.0, 2.0), median, words, "time & <more>")
    widths = [number(bar, "width") for bar in elements(svg, "rect")]
    assert widths[1] == max(widths) and widths[0] * 4 == pytest.approx(widths[1], abs=0.5)
    assert widths[2] * 2 == pytest.approx(widths[1], abs=0.5)
    assert [item.firstChild.data for item in elements(svg, "text", "figure")] == ["1 <s>", "4 <s>", "2 <s>"]
    assert elements(svg, "svg")[0].getAttribute("aria-label") == "time & <more>"
    tops = [number(bar, "y") for bar in elements(svg, "rect")]
    heights = [number(bar, "height") for bar in elements(svg, "rect")]
    assert all(below - above > height for above, below, height in zip(tops, tops[1:], heights, strict=False))


def test_peers_and_own_rows_look_different():
    svg = bars_svg([Row("eager", seconds=(1.0,)), Row("aten", seconds=(1.0,))], median, words, "t")
    assert [bar.getAttribute("class") for bar in elements(svg, "rect")] == ["peer", "own"]


def test_a_row_without_a_figure_says_why():
    given = [Row("a<b>", reason="no <onnx>: " + "x" * 200), Row("b"), Row("c", seconds=(2.0,))]
    svg = bars_svg(given, median, words, "t")
    first, second = (item.firstChild.data for item in elements(svg, "text", "why"))
    assert first.startswith("no <onnx>: xxx") and first.endswith("…") and len(first) == 91 and second == "not known"
    assert [item.firstChild.data for item in elements(svg, "text", "name")] == ["a<b>", "b", "c"]
    assert len(elements(svg, "rect")) == 1


@pytest.mark.parametrize("values", [(0.0,), (None,), (0.0, 0.0)])
def test_bars_of_nothing(values):
    svg = bars_svg(rows(*values), median, words, "t")
    assert all(number(bar, "width") == 0 for bar in elements(svg, "rect"))


def scatter(given):
    return scatter_svg(given, lambda row: row.allocated_bytes, median, (words, words), "t")


def test_dots_lie_where_their_figures_are():
    given = [
        Row("eager", seconds=(1.0,), allocated_bytes=100),
        Row("aten", seconds=(2.0,), allocated_bytes=50),
        Row("xla", seconds=(3.0,)),
        Row("static", allocated_bytes=10),
    ]
    svg = scatter(given)
    eager, aten = elements(svg, "circle")
    assert number(eager, "cx") > number(aten, "cx") and number(eager, "cy") > number(aten, "cy")
    assert [dot.getAttribute("class") for dot in (eager, aten)] == ["peer", "own"]
    assert eager.getElementsByTagName("title")[0].firstChild.data == "eager: 100 <s>, 1 <s>"
    assert not elements(svg, "polyline")
    ticks = [item.firstChild.data for item in elements(svg, "text", "tick")]
    assert ticks.count("0") == 2 and len(ticks) >= 6


def test_settings_of_one_engine_are_joined_from_left_to_right():
    given = [Row(f"aten:{size}", seconds=(1.0 / size,), allocated_bytes=size) for size in (30, 10, 20)]
    (line,) = elements(scatter([*given, Row("eager", seconds=(1.0,), allocated_bytes=5)]), "polyline")
    places = [tuple(map(float, point.split(","))) for point in line.getAttribute("points").split()]
    assert places == sorted(places) and len(places) == 3 and line.getAttribute("class") == "line own"


@pytest.mark.parametrize("count", [1, 2, 8, 15])
def test_names_of_dots_in_one_place_do_not_lie_on_one_another(count):
    given = [Row(f"engine{index}", seconds=(1.0,), allocated_bytes=100) for index in range(count)]
    svg = scatter(given)
    names = elements(svg, "text", "figure")
    bases = sorted(number(name, "y") for name in names)
    assert len(names) == count and all(b - a > 12.9 for a, b in itertools.pairwise(bases))
    assert all(0 < base < 320 for base in bases)


def test_figures_of_zero_have_a_place():
    (dot,) = elements(scatter([Row("aten", seconds=(0.0,), allocated_bytes=0)]), "circle")
    assert number(dot, "cx") == 90 and 0 < number(dot, "cy") < 320


@pytest.mark.parametrize(("value", "step"), [(1, 1), (1.01, 2), (3, 5), (7, 10), (0.03, 0.05), (250, 500), (1e9, 1e9)])
def test_round_up(value, step):
    assert round_up(value) == pytest.approx(step)


@given(st.floats(1e-9, 1e15))
def test_is_one_two_or_five_and_not_far(value):
    step = round_up(value)
    assert value * (1 - 1e-6) <= step <= value * 2.5 * (1 + 1e-6)
    digits = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(digits - known) for known in (1, 2, 5, 10)) < 1e-6
