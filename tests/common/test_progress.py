"""The line that long planning shows: on a terminal only, and gone afterwards."""

from __future__ import annotations

import io
import logging
import threading
from contextlib import redirect_stderr

import click
import pytest

from memopt.common import progress
from memopt.common.progress import captured, planning, stage


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal; a test makes it stderr itself, since pytest replaces stderr when the test begins."""
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_a_terminal_shows_what_planning_is_at(terminal):
    with redirect_stderr(terminal), planning("Model"):
        assert terminal.getvalue() == ""
        stage("searching")
        progress._current.get()._shown._bar.refresh()
    shown = terminal.getvalue()
    assert "planning Model: searching" in shown
    assert progress._current.get() is None
    stage("nobody looks")
    assert terminal.getvalue() == shown


def test_one_line_for_plans_within_plans(terminal):
    with redirect_stderr(terminal), planning("Outer"):
        with planning("Inner"):
            stage("first")
        stage("second")
        progress._current.get()._shown._bar.refresh()
    assert "Outer: second" in terminal.getvalue() and "Inner" not in terminal.getvalue()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_takes_the_line_away(terminal, error):
    before = set(threading.enumerate())
    with redirect_stderr(terminal), pytest.raises(error), planning("Model"):
        stage("searching")
        progress._current.get()._shown._bar.refresh()
        assert terminal.getvalue()
        raise error
    assert progress._current.get() is None
    for thread in set(threading.enumerate()) - before:  # the one that draws ends with its last drawing
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("where", ["file", "dumb", "thread", "command"])
def test_nothing_is_shown_where_nobody_looks(terminal, monkeypatch, where):
    def plan():
        with planning("Model"):
            stage("searching")

    stream = io.StringIO() if where == "file" else terminal
    if where == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    with redirect_stderr(stream):
        if where == "thread":
            thread = threading.Thread(target=plan)
            thread.start()
            thread.join()
        elif where == "command":
            with click.Context(click.Command("plan")):
                plan()
        else:
            plan()
    assert stream.getvalue() == ""


def test_the_line_says_how_long_it_is_expected_to_take(terminal):
    with redirect_stderr(terminal), planning("Model") as planned:
        captured(100, 0.5)
        captured(20, 0.5)
        stage("searching")
        progress._current.get()._shown._bar.refresh()
    assert planned.nodes == 120 and "of about 60 s" in terminal.getvalue()


def test_lines_are_written_where_there_is_no_terminal_once_it_takes_long(monkeypatch):
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with redirect_stderr(stream), planning("Model"):
        captured(100, 1.0)
        for seconds, text in ((5, "early"), (20, "searching"), (25, "soon"), (40, "proving"), (120, "late")):
            now[0] = float(seconds)
            stage(text)
    assert stream.getvalue().splitlines() == [
        "memopt: planning Model: searching (20 s of about 100 s)",
        "memopt: planning Model: proving (40 s of about 100 s)",
        "memopt: planning Model: late (120 s)",
    ]


def test_nothing_is_written_twice_where_the_log_tells(monkeypatch, caplog):
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, "memopt"), redirect_stderr(stream), planning("Model"):
        now[0] = 100.0
        stage("searching")
    assert stream.getvalue() == "" and caplog.messages == ["Model: searching"]
