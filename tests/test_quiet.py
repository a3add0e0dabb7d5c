"""Exporters without their words: what they print and log is kept back, errors are not, and all is as before after."""

import logging
import sys

import pytest

from memopt.quiet import quiet

NAMES = ["torch.onnx", "torch.export", "torch.export._trace", "torch.fx.experimental.symbolic_shapes", "onnxscript.x"]


def speak():
    print("printed")
    print("graph", file=sys.stderr)
    for name in NAMES:
        logging.getLogger(name).error("logged")


def test_nothing_is_heard_of_an_export(capsys, caplog):
    levels = [logging.getLogger(name).level for name in NAMES]
    with quiet():
        speak()
    assert capsys.readouterr() == ("", "") and not caplog.records
    assert [logging.getLogger(name).level for name in NAMES] == levels
    print("later")
    assert capsys.readouterr().out == "later\n"


def test_errors_come_through_and_leave_nothing_behind(capsys):
    out, err = sys.stdout, sys.stderr
    with pytest.raises(KeyboardInterrupt), quiet():
        raise KeyboardInterrupt
    assert (sys.stdout, sys.stderr) == (out, err)
    assert not any(logging.getLogger(name).level == logging.CRITICAL for name in NAMES)


def test_other_loggers_go_on(caplog):
    with quiet():
        logging.getLogger("memopt").warning("heard")
    assert [record.message for record in caplog.records] == ["heard"]


def test_who_asked_for_all_hears_all(capsys, caplog):
    with caplog.at_level(logging.DEBUG, logger="memopt"), quiet():
        speak()
    assert capsys.readouterr() == ("printed\n", "graph\n") and len(caplog.records) == len(NAMES)
