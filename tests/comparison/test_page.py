"""A comparison as text, JSON and HTML."""

import itertools
import json
import math
import re
import xml.dom.minidom

import pytest

from memopt.comparison.record import Comparison, Row
from tests.report.chromium import browser

ROWS = (
    Row("eager", seconds=(0.002, 0.001, 0.003), first_seconds=0.5, allocated_bytes=2_000_000, error=1e-7),
    Row("compile:0.5", seconds=(0.001,), first_seconds=30.0, allocated_bytes=1_500_000, process_bytes=7, error=2e-7),
    Row("aten:1MB", seconds=(0.0015, 0.0016), allocated_bytes=900_000, budget_bytes=1_000_000, notes=("a <note>",)),
    Row("static", seconds=(0.004, 0.004), error=math.inf, differs=True),
    Row("onnxruntime", reason='needs <onnx> & "more": pip install memopt[onnx]'),
)


def comparison(rows=ROWS, **more):
    settings = {"warmup": 3, "repeats": 3, "threads": 1, "optimizer": "", "batch": 2}
    return Comparison("<net>", "inference", "some CPU", "float32", rows, settings, {"torch": "2.13"}, **more)


def test_the_table():
    lines = str(comparison(notes=("of all",))).splitlines()
    assert lines[0].startswith("<net>, inference, batch 2, float32; some CPU, torch 2.13, 1 threads; median of 3 steps")
    assert lines[2].split()[:2] == ["engine", "step"]
    assert "reserved" not in lines[2] and "predicted" not in lines[2]
    assert lines[3].split() == ["eager", "2.00", "ms", "500", "µs", "500", "ms", "2.00", "MB", "1.0e-07"]
    assert lines[7].split(maxsplit=1)[1] == ROWS[-1].reason
    assert "note: of all" in lines and "note: aten:1MB: a <note>" in lines
    assert lines[-1].endswith("THE NUMBERS DIFFER by more than rounding explains: static")


def test_medians_and_spread():
    assert ROWS[0].median == 0.002 and ROWS[0].spread == pytest.approx(0.0005)
    assert ROWS[1].spread is None and Row("aten").median is None


def test_json_is_strict():
    found = json.loads(comparison().to_json(), parse_constant=lambda text: pytest.fail(text))
    assert found["schema"] == "memopt-comparison" and found["version"] == 1
    assert [row["name"] for row in found["rows"]] == [row.name for row in ROWS]
    assert found["rows"][3]["error"] == "inf"


def test_the_page_is_well_formed_and_escaped():
    page = comparison().to_html()
    xml.dom.minidom.parseString(
        page.replace("<!doctype html>", "")
        .replace('<meta charset="utf-8">', "")
        .replace('<meta name="viewport" content="width=device-width, initial-scale=1">', "")
    )
    assert "reserved" not in page and "<th" in page
    assert "<net>" not in page and "&lt;net&gt;" in page
    assert "needs &lt;onnx&gt; &amp; &quot;more&quot;" in page
    assert page.count("<svg") == 4 and "http" not in page and "<script" not in page
    assert page.count('<rect class="own"') == 3 and page.count('<rect class="peer"') == 5


@pytest.mark.parametrize("rows", [(), (ROWS[4],), ROWS[:1]])
def test_pages_of_little(rows):
    assert "</html>" in comparison(rows).to_html()
    assert str(comparison(rows)).startswith("<net>")


def test_saving(tmp_path):
    for suffix, start in ((".json", "{"), (".html", "<!doctype"), (".txt", "<net>")):
        comparison().save(tmp_path / f"c{suffix}")
        assert (tmp_path / f"c{suffix}").read_text().startswith(start)
    with pytest.raises(ValueError, match="must end in"):
        comparison().save(tmp_path / "c.pdf")


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_in_a_browser(chromium, tmp_path, dark):
    crowd = tuple(Row(f"aten:{number}MB", seconds=(0.001,) * 2, allocated_bytes=2_000_000) for number in range(5))
    comparison((*ROWS, *crowd)).save(tmp_path / "c.html")
    chromium.troubles.clear()
    chromium.open(tmp_path / "c.html", dark=dark, width=900)
    assert chromium.troubles == []
    assert "THE NUMBERS DIFFER" not in chromium.text("body") and "The numbers differ" in chromium.text("body")
    names = """[...document.querySelectorAll('svg text.figure')].map((item) => {
      const box = item.getBoundingClientRect();
      return [item.closest('svg').getAttribute('aria-label'), box.left, box.top, box.right, box.bottom];
    }).filter((item) => item[0].startsWith('time of a step over'))"""
    boxes = [box[1:] for box in chromium.run(names)]
    assert len(boxes) == 8
    for one, other in itertools.combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] + 4 or other[3] <= one[1] + 4
    ink, paper = chromium.run("['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])")
    light = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in (ink, paper)]
    assert (light[0] > light[1]) == dark
    assert chromium.screenshot(tmp_path / "c.png", whole=True).startswith(b"\x89PNG")
