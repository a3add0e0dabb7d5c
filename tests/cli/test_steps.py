import io
import sys

import click

from memopt.cli.steps import steps


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with steps(click.Context(click.Command("x")), "converting m") as begin:
        for step in ("capture", "export"):
            begin(step)
    return stream.getvalue()


def test_steps_are_shown_on_a_terminal_only(monkeypatch):
    assert shown(monkeypatch, io.StringIO()) == ""
    assert "converting m: export" in shown(monkeypatch, Terminal())
