"""The record of a conversion: read back equal, and its page in a browser."""

import dataclasses
import json

import pytest

from memopt import models
from memopt.convert.page import conversion_view, to_html
from memopt.convert.pipeline import convert_module
from memopt.convert.record import from_json, load
from memopt.report import load as load_report
from memopt.report.json_format import from_json as report_from_json
from tests.report.chromium import browser
from tests.report.samples import NASTY
from tests.report.test_html_page import data_of, parsed


@pytest.fixture(scope="module")
def record():
    model = models.build("bert_base", tiny=True).eval()
    return convert_module(model, model.example_inputs(2, sequence=16), None, source="bert_base")


def test_is_read_back_equal(record, tmp_path):
    (tmp_path / "record.json").write_text(record.to_json())
    assert load(tmp_path / "record.json") == record


def test_is_no_report_and_says_how_to_read_it(record, tmp_path):
    (tmp_path / "record.json").write_text(record.to_json())
    with pytest.raises(ValueError, match=r"read it with memopt\.convert\.record\.load"):
        load_report(tmp_path / "record.json")
    with pytest.raises(ValueError, match='no "schema": "memopt-conversion"'):
        from_json('{"schema": "memopt-report", "version": 3}')
    newer = {**json.loads(record.to_json()), "version": 99}
    with pytest.raises(ValueError, match="version 99, written by a newer memopt; this memopt reads version 2"):
        from_json(json.dumps(newer))
    with pytest.raises(ValueError, match="not a memopt report"):
        report_from_json("{}")


def test_every_pass_has_its_graphs_by_module(record):
    assert all(item.before is not None and item.after is not None for item in record.passes)
    modules = {node.module for node in record.passes[-1].after.steps}
    assert {"encoder.layers.0", "encoder.layers.1"} <= modules
    assert any("bert.py" in node.source for node in record.passes[-1].after.steps)
    assert record.passes[-1].after.peak_bytes
    assert record.passes[-1].after.flops == record.passes[0].before.flops > 0


def test_view_has_the_figures(record):
    view = conversion_view(record)
    cards = {card["label"]: card for card in view["cards"]}
    before, after = sum(record.nodes_before.values()), sum(record.nodes_after.values())
    assert cards["nodes"]["value"] == f"{before:,} → {after:,}"
    assert cards["difference"]["tone"] == "good"
    assert {table["title"] for table in view["tables"]} >= {"Inputs and outputs", "Nodes by operator"}
    folded = [group for item in view["passes"] for group in item["diff"] if len(group["blocks"]) > 1]
    assert folded


def test_page_is_complete_in_itself(record):
    page = to_html(dataclasses.replace(record, source=NASTY))
    found = parsed(page)
    assert found.addresses == []
    assert found.tags.count("script") == 2
    assert data_of(page)["title"].startswith(NASTY)


def test_page_opens_in_a_browser(record, tmp_path):
    path = tmp_path / "conversion.html"
    path.write_text(to_html(dataclasses.replace(record, source=NASTY)))
    with browser() as chromium:
        for dark in (False, True):
            chromium.open(path, dark=dark)
            assert chromium.screenshot(tmp_path / "conversion.png", whole=True).startswith(b"\x89PNG")
        assert NASTY in chromium.text("h1")
        assert "alive" in chromium.text("#memory-0 .alive")
        chromium.press("/")
        chromium.write("encoder.layers.0")
        assert "found" in chromium.text("#found")
        assert chromium.run("document.querySelectorAll('.row').length") > 0
        assert chromium.troubles == []
