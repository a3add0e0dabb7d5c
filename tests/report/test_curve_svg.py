import re
import xml.etree.ElementTree as ElementTree

import pytest

from memopt.report.curve_svg import curve_svg
from memopt.report.svg import HEIGHT, WIDTH
from memopt.step_curve import CurvePoint
from tests.report.samples import report

ONE = (CurvePoint(5, 0.0, 0.0, chosen=True),)


@pytest.mark.parametrize("curve", [report().curve, ONE, (CurvePoint(0, 0.0, 0.0),), report().curve[:2]])
def test_every_point_lies_on_the_page(curve):
    root = ElementTree.fromstring(curve_svg(curve, 900_000_000))
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == len(curve)
    for element in circles:
        assert 0 <= float(element.get("cx")) <= WIDTH
        assert 0 <= float(element.get("cy")) <= HEIGHT


def test_less_memory_is_further_left_and_more_time_higher_up():
    places = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', curve_svg(report().curve))
    assert [float(x) for x, _ in places] == sorted((float(x) for x, _ in places), reverse=True)
    assert [float(y) for _, y in places] == sorted((float(y) for _, y in places), reverse=True)


def test_the_chosen_point_is_marked_and_said():
    drawn = curve_svg(report().curve)
    assert drawn.count('class="chosen"') == 1
    assert "chosen: 880.00 MB (839.23 MiB): +10.0%" in drawn


def test_axes_have_labels_in_bytes_and_in_added_time():
    labels = re.findall(r'class="tick"[^>]*>([^<]+)</text>', curve_svg(report().curve))
    assert "+20 %" in labels
    assert {"0.6 GB", "0.8 GB", "1 GB"} <= set(labels)


def test_a_budget_outside_of_the_picture_is_not_drawn():
    assert 'class="budget"' in curve_svg(report().curve, 900_000_000)
    assert 'class="budget"' not in curve_svg(report().curve, 10**12)
