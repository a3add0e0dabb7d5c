"""Exporters without their words: what they print and log is kept back, errors are not, and all is as before after."""

import logging
import os
import sys

import pytest
import torch

import memopt
from memopt.common.quiet import quiet, without_lines

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
    heard = capsys.readouterr()  # torch's own handler may write to stderr as well
    assert heard.out == "printed\n" and heard.err.startswith("graph\n") and len(caplog.records) == len(NAMES)


def test_lines_of_others_are_dropped_by_words_and_the_rest_stays_in_order(capfd):
    os.write(2, b"before\n")
    with without_lines("USDT:", "unknown size"):
        os.write(2, b"USDT: profiler_start\nfrom C\n")
        os.write(2, b"from Python\n")
        os.write(2, b"[W] Memory block of unknown size\nlast")
        with without_lines("from"):  # within another one nothing is changed
            os.write(2, b" from within\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nfrom C\nfrom Python\nlast from within\nafter\n"


def test_lines_are_written_when_a_block_fails(capfd):
    with pytest.raises(KeyError), without_lines("USDT:"):
        os.write(2, b"kept\n")
        raise KeyError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "kept\nafter\n"


def test_planning_writes_nothing_to_stderr_and_tells_the_log(capfd, caplog):
    torch._dynamo.reset()
    x = torch.randn(4, 8)
    for level, count in ((logging.WARNING, 0), (logging.INFO, 3)):
        torch._dynamo.reset()
        caplog.clear()
        with caplog.at_level(level, "memopt"):
            run = memopt.compile(torch.nn.Linear(8, 8), "1MB", backend="aten")
            for _ in range(3):
                run(x).sum().backward()
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) >= count and (count or not lines)
        assert capfd.readouterr().err == ""
    assert all(line.startswith("Linear: ") for line in lines)
    assert any("captured" in line for line in lines) and any("trial" in line or "step" in line for line in lines)
    assert any(
        "planned, compiled and run a training step" in line and "of a budget of 1.00 MB" in line for line in lines
    )
