"""The drawing of an arena is well-formed, and its rectangles are the plan's blocks."""

import xml.etree.ElementTree as ElementTree

from benchmarks.arena_svg import HEIGHT, WIDTH, arena_svg
from memopt.memory.buffers import Block, BufferPlan, Home

BLOCKS = (
    Block("a<b>", Home.ARENA, 64, 0, 2, 0, ("a<b>",)),
    Block("b", Home.ARENA, 128, 1, 4, 64, ("b", "c")),
    Block("d", Home.ARENA, 64, 3, 4, 0, scratch=True),
    Block("out", Home.OUTPUT, 256, 3, 4, 0, ("out",)),
)


def parsed(plan):
    return ElementTree.fromstring(arena_svg(plan))


def plan(blocks=BLOCKS, size=192):
    return BufferPlan(("a", "b", "c", "d"), blocks, {}, ((),) * 4, {}, {}, size, 128, 64)


def test_one_rectangle_per_block_of_the_arena():
    root = parsed(plan())
    name = "{http://www.w3.org/2000/svg}"
    rectangles = root.findall(f"{name}rect")
    assert [r.get("class") for r in rectangles] == ["value", "shared", "scratch"]
    titles = [r.find(f"{name}title").text for r in rectangles]
    assert titles[0] == "a<b>: 64 B at 0, operations 0 to 1" and titles[2].startswith("scratch of d")
    for r in rectangles:
        left, top, width, height = (float(r.get(key)) for key in ("x", "y", "width", "height"))
        assert 0 <= left <= left + width <= WIDTH and 0 <= top <= top + height <= HEIGHT
    first, second = (float(r.get("height")) for r in rectangles[:2])
    assert abs(second - 2 * first) < 0.05
    assert "192 B" in arena_svg(plan()) and "at least 128 B" in arena_svg(plan())


def test_an_empty_arena():
    assert parsed(plan((), 0)).tag.endswith("svg")
