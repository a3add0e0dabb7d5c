import re
import xml.etree.ElementTree as ElementTree

import pytest

from memopt.report.svg import HEIGHT, WIDTH, timeline_svg


@pytest.mark.parametrize(
    ("before", "after"), [([], []), ([], [5]), ([0, 0], [0]), ([10**9] * 3, [1]), (range(5000), range(0, 9000, 3))]
)
def test_every_point_lies_on_the_page(before, after):
    root = ElementTree.fromstring(timeline_svg(list(before), list(after), budget=7, forward_steps=1, name='<"&>'))
    for element in root.iter():
        for point in (element.get("points") or "").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT


def test_peak_of_a_long_timeline_is_drawn():
    values = [1] * 10_000
    values[1234] = 100
    heights = [
        float(y)
        for y in re.findall(r",([\d.]+)", re.search(r'class="after" points="([^"]+)"', timeline_svg([], values))[1])
    ]
    assert min(heights) < HEIGHT * 0.2


def test_boundary_between_forward_and_backward():
    assert "backward</text>" in timeline_svg([], [1, 2, 3], forward_steps=2)
    assert "backward</text>" not in timeline_svg([], [1, 2, 3])
