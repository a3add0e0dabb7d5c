"""The page as text: complete in itself, with everything in it, and no name that could become code."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from importlib import resources

from memopt.report.html_page import to_html
from memopt.report.view import report_view
from tests.report.samples import NASTY, report

VOID = {"meta"}


class Checker(HTMLParser):
    """Every tag closed in order; tags, addresses, and the text in each kind of element collected."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.tags, self.addresses, self.words = [], [], [], {}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words[self.open[-1] if self.open else ""] = self.words.get(self.open[-1] if self.open else "", "") + data


def parsed(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_page_is_well_formed_and_complete_in_itself():
    page = to_html(report())
    found = parsed(page)
    assert found.addresses == []
    assert found.tags.count("script") == 2
    assert not {"link", "img", "iframe"} & set(found.tags)
    assert "default-src 'none'" in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


def test_names_cannot_leave_their_place():
    page = to_html(dataclasses.replace(report(), notes=("</script><script>alert(2)</script><!--", "]]>\u2028")))
    assert page.count("<script") == 2
    assert page.count("</script") == 2
    assert data_of(page)["notes"][0] == "</script><script>alert(2)</script><!--"
    assert data_of(page)["title"] == NASTY
    assert NASTY in parsed(page).words["pre"]


def test_data_are_what_the_view_says():
    assert data_of(to_html(report())) == report_view(report())


def test_summary_says_what_decides():
    cards = {card["label"]: card for card in report_view(report())["cards"]}
    assert cards["budget"]["value"] == "900.00 MB"
    assert cards["predicted peak"]["value"] == "880.00 MB"
    assert cards["measured peak"] == {
        "label": "measured peak", "value": "879.00 MB", "note": "within the budget", "tone": "good",
    }  # fmt: skip
    assert cards["time of a step"]["value"] == "550 ms"
    assert cards["error"]["value"] == "1.5e-07"


def test_over_the_budget_is_said():
    cards = {c["label"]: c for c in report_view(dataclasses.replace(report(), measured_peak_bytes=10**10))["cards"]}
    assert (cards["measured peak"]["tone"], cards["measured peak"]["note"]) == ("bad", "OVER THE BUDGET")


def test_what_is_not_known_is_not_invented():
    bare = dataclasses.replace(report(), measured_peak_bytes=None, budget_bytes=None, curve=(), passes=())
    cards = {card["label"]: card["value"] for card in report_view(bare)["cards"]}
    assert cards["budget"] == "none"
    assert cards["measured peak"] == "not measured"
    assert not {"time of a step", "least possible"} & set(cards)


def test_passes_have_evidence_changes_and_refusals():
    first, second = report_view(report())["passes"]
    assert "max abs error 1.5e-07" in first["evidence"]
    assert "1 not proved" in first["evidence"]
    assert first["changes"] == [["merged", ["a", "b"], ["a"]]]
    assert len(first["refusals"]) == 5
    assert first["unproved"] == [f"relu: {NASTY}"]
    assert second["changes"] == []


def test_files_of_the_page_are_short_and_in_the_package():
    folder = resources.files("memopt.report") / "page"
    for entry in folder.iterdir():
        assert len(entry.read_text("utf-8").splitlines()) < 400
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(
        ["base.js", "charts.js", "memory.js", "passes.js", "page.js", "page.css", "steps.js"]
    )
