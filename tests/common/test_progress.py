"""The line that long planning shows: on a terminal only, and gone afterwards."""

from __future__ import annotations

import io
import threading
from contextlib import redirect_stderr

import click
import pytest

from memopt.common import progress
from memopt.common.progress import planning, stage


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
        progress._current._bar.refresh()
    shown = terminal.getvalue()
    assert "planning Model: searching" in shown
    assert progress._current is None
    stage("nobody looks")
    assert terminal.getvalue() == shown


def test_one_line_for_plans_within_plans(terminal):
    with redirect_stderr(terminal), planning("Outer"):
        with planning("Inner"):
            stage("first")
        stage("second")
        progress._current._bar.refresh()
    assert "Outer: second" in terminal.getvalue() and "Inner" not in terminal.getvalue()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_takes_the_line_away(terminal, error):
    before = set(threading.enumerate())
    with redirect_stderr(terminal), pytest.raises(error), planning("Model"):
        stage("searching")
        progress._current._bar.refresh()
        assert terminal.getvalue()
        raise error
    assert progress._current is None
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
