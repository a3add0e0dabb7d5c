"""The HTML form of a report: one self-contained page, data and script inside it, nothing fetched."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources

from memopt.report.record import Report
from memopt.report.text import to_text
from memopt.report.view import View, report_view

_SCRIPTS = ("base.js", "charts.js", "memory.js", "passes.js", "page.js")
# Nothing is loaded from anywhere, whatever a name in the report may say.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def to_html(report: Report) -> str:
    """The page of a compilation."""
    return render_page(report_view(report), to_text(report))


def render_page(view: View, text: str, charts: Sequence[str] = ()) -> str:
    """One page.

    Args:
        view: what it shows, as `memopt.report.view` makes it.
        text: what is shown where no script runs.
        charts: scripts of charts that only this kind of page has.
    """
    folder = resources.files("memopt.report") / "page"
    script = "".join((folder / name).read_text("utf-8") for name in (*charts, *_SCRIPTS))
    style = (folder / "page.css").read_text("utf-8")
    # In JSON a "<" stands in strings only, so that no text of the report can end the element.
    data = json.dumps(view, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>memopt: {html.escape(str(view['title']))}</title>\n<style>\n{style}</style></head>\n"
        f'<body>\n<main id="page"></main>\n<noscript><pre>{html.escape(text)}</pre></noscript>\n'
        f'<script type="application/json" id="data">{data}</script>\n<script>\n"use strict";\n{script}</script>\n'
        "</body></html>\n"
    )
