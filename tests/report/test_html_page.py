import dataclasses
from html.parser import HTMLParser

from memopt.report.html_page import to_html
from tests.report.samples import NASTY, report

VOID = {"meta", "br", "line", "polyline", "polygon"}


class Checker(HTMLParser):
    """Every tag closed in order; the text, the tags and the addresses collected."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.tags, self.words, self.addresses = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def parsed(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def test_page_is_well_formed_and_self_contained():
    page = parsed(to_html(report()))
    assert page.addresses == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert page.tags.count("svg") == 2  # the curve's, and one timeline: the other program has none


def test_names_are_escaped_and_still_readable():
    text = to_html(report())
    assert "<script>" not in text
    assert NASTY in "".join(parsed(text).words)


def test_page_shows_evidence_changes_and_refusals():
    words = "".join(parsed(to_html(report())).words)
    for expected in ("max abs error 1.5e-07", "1 changes", "5 refusals", "1 not proved", "relu: <script>", "gelu"):
        assert expected in words


def test_budget_line_only_with_a_budget():
    assert '<line class="budget"' in to_html(report())
    assert '<line class="budget"' not in to_html(dataclasses.replace(report(), budget_bytes=None))


def test_over_the_budget_is_marked():
    assert '<dd class="bad">' not in to_html(report())
    assert '<dd class="bad">' in to_html(dataclasses.replace(report(), measured_peak_bytes=10**10))


def test_the_curve_is_drawn_and_listed_where_there_is_one():
    words = "".join(parsed(to_html(report())).words)
    assert "3 plans" in words
    assert "880.00 MB (839.23 MiB): +10.0%" in words
    bare = dataclasses.replace(report(), curve=())
    assert "would cost" not in to_html(bare)
    assert parsed(to_html(bare)).tags.count("svg") == 1
