"""The page in a real browser: no error, nothing fetched, and the controls do what they say, by pointer and by key."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
import torch

import memopt
from memopt import models
from memopt.graph.record import GraphRecord
from memopt.report import Report
from memopt.report.view import report_view
from tests.report.chromium import Browser, browser
from tests.report.samples import NASTY
from tests.report.samples import report as nasty_report


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.fixture(autouse=True)
def no_trouble(chromium: Browser):
    chromium.troubles.clear()
    yield
    assert chromium.troubles == []


@pytest.fixture(scope="module")
def training() -> Report:
    torch.manual_seed(0)
    model = models.build("gpt2", tiny=True).train()
    return memopt.plan(model, model.example_inputs(16, labels=True), 0.7)


@pytest.fixture(scope="module")
def page(training, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "training.html"
    training.save(path)
    return path


@pytest.fixture
def opened(chromium, page):
    chromium.open(page)
    return chromium


def pictured(chromium: Browser, path) -> None:
    """A screenshot that shows something: a PNG whose pixels are not all alike."""
    data = chromium.screenshot(path, whole=True)
    assert data.startswith(b"\x89PNG")
    assert len(zlib.compress(data)) > 20_000


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 480])
def test_opens_at_once_in_light_and_dark(chromium, page, tmp_path, dark, width):
    assert chromium.open(page, dark=dark, width=width) < 30  # a generous guard: loads are measured elsewhere
    assert chromium.run("document.documentElement.scrollWidth <= innerWidth")
    pictured(chromium, tmp_path / "page.png")
    ink, paper = chromium.run("['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])")
    assert (luminance(ink) > luminance(paper)) == dark


def test_every_text_can_be_read(chromium, page):
    """WCAG: 4.5 to 1 between text and what it stands on, in both themes."""
    for dark in (False, True):
        chromium.open(page, dark=dark)
        chromium.run("document.querySelectorAll('details').forEach((item) => { item.open = true })")
        chromium.run("new Promise((done) => setTimeout(done, 50))")
        chromium.run("document.querySelectorAll('.group').forEach((item) => { item.open = true })")
        found = chromium.run(
            """[...document.querySelectorAll('main *')].filter((e) => e.checkVisibility() && !e.closest('svg') &&
              [...e.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim())).map((e) => {
                let [on, paper] = [e, 'rgba(0, 0, 0, 0)'];
                for (; on && paper === 'rgba(0, 0, 0, 0)'; on = on.parentElement) {
                  paper = getComputedStyle(on).backgroundColor;
                }
                return [e.tagName + '.' + e.className, getComputedStyle(e).color, paper];
            })"""
        )
        assert len(found) > 100
        bad = {(name, ink, paper) for name, ink, paper in found if contrast(ink, paper) < 4.5}
        assert bad == set()


def luminance(color: str) -> float:
    parts = [float(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_summary_has_the_figures(opened, training):
    words = opened.text("#summary")
    for expected in ("budget", "predicted peak", "measured peak", "time of a step", "error"):
        assert expected in words


def test_theme_button_turns_light_to_dark_and_back(opened):
    paper = "getComputedStyle(document.body).backgroundColor"
    light = opened.run(paper)
    opened.point("#theme", click=True)
    dark = opened.run(paper)
    assert luminance(dark) < luminance(light)
    opened.run("document.querySelector('#theme').focus()")
    opened.press("Enter")
    assert opened.run(paper) == light


def test_cursor_tells_what_is_alive_by_keys_and_by_pointer(opened, training):
    (program,) = training.programs
    line = program.timeline_after
    opened.run("document.querySelector('#memory-0 svg').focus()")
    assert value(opened, "#memory-0 svg") == line.index(max(line))
    opened.press("Home")
    assert value(opened, "#memory-0 svg") == 0
    opened.press("ArrowRight")
    assert value(opened, "#memory-0 svg") == 1
    opened.press("End")
    assert value(opened, "#memory-0 svg") == len(line) - 1
    opened.press("p")
    peak = line.index(max(line))
    words = opened.text("#memory-0 .alive")
    assert f"Operation {peak}" in words
    alive = sorted((s for s in program.after.storages if s.start <= peak < s.end), key=lambda s: -s.bytes)
    assert f"{len(alive)} tensors alive" in words
    named = {node.id: node for node in program.after.nodes}[alive[0].node]
    assert named.name in words
    assert named.source.rpartition("/")[2][:20] in words
    seconds = program.seconds_after
    moment = sum(seconds) / 2
    whole = max(sum(seconds), sum(program.seconds_before))
    left, width = opened.run("[74, WIDTH - 14 - 74].map((units) => units / WIDTH)")
    opened.point("#memory-0 svg", x=left + width * moment / whole)
    found = value(opened, "#memory-0 svg")  # what lies there lies there by time, not by number
    assert abs(sum(seconds[:found]) - moment) < 0.02 * whole
    assert "predicted" in opened.run("document.querySelector('#memory-0 svg').textContent")
    opened.point("#memory-0 svg", x=0.1)
    assert value(opened, "#memory-0 svg") < peak
    opened.run(
        "[...document.querySelectorAll('#memory-0 button')].find((b) => b.innerText === 'without a plan').click()"
    )
    assert value(opened, "#memory-0 svg") == program.timeline_before.index(max(program.timeline_before))


def button(inside: str, words: str) -> str:
    return f"[...document.querySelectorAll('{inside} button')].find((b) => b.innerText === '{words}')"


def value(chromium: Browser, selector: str) -> int:
    return int(chromium.run(f"document.querySelector('{selector}').getAttribute('aria-valuenow')"))


def test_curve_is_walked_by_keys(opened, training):
    chosen = next(at for at, point in enumerate(training.curve) if point.chosen)
    assert value(opened, "#curve svg") == chosen
    assert "chosen" in opened.text("#curve .readout")
    opened.run("document.querySelector('#curve svg').focus()")
    opened.press("Home")
    assert value(opened, "#curve svg") == 0
    opened.press("ArrowLeft")  # less memory is to the left
    assert value(opened, "#curve svg") == 1


def test_search_finds_nodes_and_hides_the_rest(opened):
    opened.press("/")
    opened.write("gelu")
    assert opened.run("document.activeElement.id") == "search"
    assert "found" in opened.text("#found")
    visible = opened.run("[...document.querySelectorAll('.pass')].filter((e) => !e.hidden).length")
    assert 0 < visible < opened.run("document.querySelectorAll('.pass').length")
    rows = opened.run("[...document.querySelectorAll('.row')].map((row) => row.innerText.toLowerCase())")
    assert rows
    assert all("gelu" in row or "activation" in row for row in rows)
    opened.write(" which nothing has")
    assert opened.run("[...document.querySelectorAll('.pass')].every((e) => e.hidden)")


def test_changes_only_by_default_and_all_nodes_on_demand(opened, training):
    name = next(r.name for r in training.passes if r.changes and r.before is not r.after)
    card = f"[...document.querySelectorAll('.pass')].find((e) => e.querySelector('b').innerText === {name!r})"
    opened.run(f"{card}.open = true")
    opened.run("new Promise((done) => setTimeout(done, 50))")
    opened.run(f"{card}.querySelectorAll('.group').forEach((e) => {{ e.open = true }})")
    opened.run("new Promise((done) => setTimeout(done, 50))")
    assert opened.run(f"{card}.querySelectorAll('.row').length") > 0
    assert opened.run(f"{card}.querySelectorAll('.row.same').length") == 0
    groups = opened.run(f"{card}.querySelectorAll('.group').length")
    opened.run(f"{button('#passes', 'all nodes')}.click()")
    opened.run(f"{card}.querySelectorAll('.group').forEach((e) => {{ e.open = true }})")
    opened.run("new Promise((done) => setTimeout(done, 50))")
    assert opened.run(f"{card}.querySelectorAll('.row.same').length") > 0
    assert opened.run(f"{card}.querySelectorAll('.group').length") >= groups


def test_details_open_by_key_and_refusals_have_reasons(opened, training):
    refused = next(record for record in training.passes if record.refusals)
    card = f"[...document.querySelectorAll('.pass')].find((e) => e.querySelector('b').innerText === {refused.name!r})"
    opened.run(f"{card}.querySelector('summary').focus()")
    opened.press("Enter")
    opened.run("new Promise((done) => setTimeout(done, 50))")
    assert opened.run(f"{card}.open")
    assert refused.refusals[0].reason[:40] in opened.run(f"{card}.innerText")


def test_decisions_are_sorted_and_filtered(opened, training):
    (program,) = training.programs
    table = "#decisions-0 .decisions"
    first = opened.text(f"{table} tbody tr")
    largest = report_view(training)["programs"][0]["decisions"][0]
    assert largest[1][0] in first and f"{len(largest[1])}\t" in first and largest[4] in first
    opened.run("document.querySelector('#decisions-0 input').focus()")
    opened.write("recomputed")
    rows = opened.run(f"[...document.querySelectorAll('{table} tbody tr')].map((row) => row.innerText)")
    assert 0 < len(rows) <= min(12, len(program.recomputed))
    assert all("recomputed" in row for row in rows)
    names = [row.name for row in program.recomputed]
    opened.run("document.querySelector('#decisions-0 input').value = ''")
    opened.write(names[-1])  # each is found, in whatever row it is
    assert opened.run(f"document.querySelectorAll('{table} tbody tr').length") >= 1


def test_arena_is_drawn_to_scale_and_read_by_key(chromium, tmp_path):
    model = models.build("densenet121", tiny=True).eval()
    report = memopt.plan(model, model.example_inputs(1), backend="static")
    report.save(tmp_path / "static.html")
    chromium.open(tmp_path / "static.html")
    pictured(chromium, tmp_path / "static.png")
    arena = report.programs[0].arena
    inside = [block for block in arena.blocks if block.home == "arena" and block.bytes]
    assert chromium.run("document.querySelectorAll('#arena-0 rect.block').length") == len(inside)
    assert "lower bound" in chromium.run("document.querySelector('#arena-0').textContent")
    heights = chromium.run(
        "[...document.querySelectorAll('#arena-0 rect.block')].map((block) => Number(block.getAttribute('height')))"
    )
    tallest = max(range(len(inside)), key=lambda at: inside[at].bytes)
    assert heights[tallest] == max(heights)
    chromium.run("document.querySelector('#arena-0 svg').focus()")
    chromium.press("ArrowRight")
    assert f"address {inside[0].offset:,}" in chromium.text("#arena-0 .readout")


def test_hostile_names_stay_text(chromium, training, tmp_path):
    """Markup in every string of a real report's tables, and in a made-up report's records."""

    def hostile(graph: GraphRecord) -> GraphRecord:
        nodes = [dataclasses.replace(node, module=f"{NASTY}.0", source=NASTY, result=NASTY) for node in graph.nodes]
        return dataclasses.replace(graph, nodes=tuple(nodes))

    records = tuple(
        dataclasses.replace(item, before=hostile(item.before), after=hostile(item.after))
        for item in training.passes
        if item.before is not None and item.after is not None
    )
    broken = dataclasses.replace(training, passes=records, notes=("</script><img src=x onerror=alert(1)>",))
    for number, report in enumerate((broken, nasty_report())):
        path = tmp_path / f"{number}.html"
        report.save(path)
        chromium.open(path)
        chromium.run("document.querySelectorAll('details').forEach((item) => { item.open = true })")
        chromium.run("new Promise((done) => setTimeout(done, 50))")
        assert chromium.run("document.querySelectorAll('script').length") == 2
        assert chromium.run("document.querySelectorAll('img, iframe').length") == 0
        assert NASTY in chromium.run("document.body.innerText") or number == 0


class Broken(torch.nn.Module):
    """A graph break between two layers: two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        y = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(y).square().mean()


def test_passes_say_which_graph_they_are_of(chromium, tmp_path):
    report = memopt.plan(Broken(), (torch.ones(128, 64),))
    assert {record.program for record in report.passes} == {0, 1}
    report.save(tmp_path / "two.html")
    chromium.open(tmp_path / "two.html")
    names = chromium.run("[...document.querySelectorAll('.pass summary')].map((item) => item.innerText)")
    assert [name for name in names if "graph 0" in name]
    assert [name for name in names if "graph 1" in name]
    assert chromium.run("document.querySelectorAll('#memory-0, #memory-1').length") == 2
