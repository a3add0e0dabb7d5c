"""What the user is told of a model's steps, before there is a report and once there is one."""

import dataclasses

import pytest

from memopt.memory.resident import Resident
from memopt.report.record import ExecutableReport
from memopt.step.session_report import SessionReport
from tests.report.samples import report
from tests.step.test_planned import planned, program

SAMPLE = dataclasses.replace(report(), notes=(), peak_bytes=1000, measured_peak_bytes=None)


@pytest.fixture
def told():
    made = SessionReport(None, Resident())
    made.report = SAMPLE
    return made


def test_a_note_is_told_once_and_taken_back(told):
    for _ in range(2):
        told.note("a line")
    assert told.report.notes == ("a line",) and SAMPLE.notes == ()
    told.unsay("another")
    told.unsay("a line")
    assert told.report.notes == () and told.notes == []


def test_notes_before_there_is_a_report_wait_for_it():
    early = SessionReport(None, Resident())
    early.note("early")
    early.took(5)
    early.expects(5)
    early.compiled([ExecutableReport("forward", 1, 2, 3)])
    assert early.report is None and early.notes == ["early"] and len(early.executables) == 1


def test_what_is_said_of_optimizers_takes_the_place_of_what_was(told):
    told.note("of the step")
    told.note_optimizers(["counted", "of the step"])
    told.note_optimizers(["counted otherwise"])
    assert told.report.notes == ("counted otherwise",), "a line of both goes with the optimizers'"
    told.note_optimizers([])
    assert told.report.notes == ()


def test_values_on_the_host_are_told_by_number_and_bytes(told):
    told.waits_on_host([1_000_000])
    assert told.notes == [
        "1 value waits, 1.00 MB (976.56 KiB), in the host's pinned memory between forward and backward"
    ]
    told.waits_on_host([1_000_000, 2_000_000])
    (line,) = told.report.notes
    assert line.startswith("2 values wait, 3.00 MB ")
    told.waits_on_host([])
    assert told.report.notes == ()


def test_peaks_are_put_on_record(told):
    told.took(700)
    assert told.report.measured_peak_bytes == 700
    told.expects(900)
    assert told.report.peak_bytes == 1000, "its tensors take more"
    told.expects(1200)
    assert told.report.peak_bytes == 1200


def test_executables_are_added_and_failed_trials_are_told(told):
    first, second = ExecutableReport("forward", 1, 2, 3), ExecutableReport("backward", 4, 5, 6)
    told.compiled([first])
    told.compiled([second])
    assert told.report.executables == (first, second)
    told.note_failures([planned(program()), dataclasses.replace(planned(program()), failure="no such operator")])
    assert told.report.notes == ("no trial step was measured: no such operator",)


def test_seconds_are_on_record_even_where_the_block_fails(told):
    with pytest.raises(ValueError, match="within"), told.timed("a phase"):
        raise ValueError("within")
    assert told.report.seconds["a phase"] >= 0.0 and SAMPLE.seconds != told.report.seconds
