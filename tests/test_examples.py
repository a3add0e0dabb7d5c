"""The example reports under docs/examples: complete, as the page is now, and opened in a real browser."""

from __future__ import annotations

import re
import zlib

import pytest

from benchmarks.examples import CONVERSION, EXAMPLES, FOLDER, page_of
from memopt.report import load
from tests.report.chromium import browser

NAMES = list(EXAMPLES)
MOST_BYTES = 5_000_000


@pytest.mark.parametrize("name", NAMES)
def test_page_is_made_of_the_json_that_lies_beside_it(name):
    """`python benchmarks/examples.py --render` makes the pages anew."""
    assert (FOLDER / f"{name}.html").read_text() == page_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_is_small_and_names_no_folder_of_the_machine_that_made_it(name):
    for suffix in ("html", "json"):
        text = (FOLDER / f"{name}.{suffix}").read_text()
        assert len(text) < MOST_BYTES
        assert not re.search(r"/(home|root|tmp|work|usr)/", text)


def test_the_training_plan_is_for_a_device_that_need_not_be_here():
    report = load(FOLDER / "gpt2_medium_training.json")
    assert "H100" in report.environment.device
    assert report.peak_bytes <= report.budget_bytes < report.unconstrained_bytes
    assert {node.phase for node in report.programs[0].after.steps} == {"forward", "backward"}


def test_the_inference_has_its_arena_and_its_proofs():
    report = load(FOLDER / "resnet50_inference.json")
    assert report.programs[0].arena is not None
    assert all(item.evidence is not None for item in report.passes if item.changes)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_opens_in_a_browser(name, dark, tmp_path):
    with browser() as chromium:
        chromium.open(FOLDER / f"{name}.html", dark=dark)
        picture = chromium.screenshot(tmp_path / f"{name}.png", whole=True)
        assert picture.startswith(b"\x89PNG")
        assert len(zlib.compress(picture)) > 50_000
        assert "tensors alive" in chromium.text("#memory-0 .alive")
        assert chromium.run("document.querySelectorAll('.pass').length") > 5
        chromium.run("document.querySelectorAll('.pass').forEach((item) => { item.open = true })")
        chromium.run("new Promise((done) => setTimeout(done, 100))")
        folded = chromium.run("[...document.querySelectorAll('.times')].map((item) => Number(item.innerText.slice(1)))")
        assert max(folded) >= {"resnet50_inference": 16, "gpt2_medium_training": 20, CONVERSION: 12}[name]
        assert chromium.troubles == []
