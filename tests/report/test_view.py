"""What the page shows of tensors and of time: like ones of many blocks in one row, and what each operation takes."""

import dataclasses

import pytest
import torch

import memopt
from memopt import models
from memopt.report import ProgramReport, TensorRow
from memopt.report.json_format import from_json, to_json
from memopt.report.view import report_view


@pytest.fixture(scope="module")
def training():
    torch.manual_seed(0)
    model = models.build("gpt2", tiny=True).train()
    return memopt.plan(model, model.example_inputs(16, labels=True), 0.7)


def test_every_operation_of_both_timelines_has_its_time(training):
    (program,) = training.programs
    assert len(program.seconds_before) == len(program.timeline_before)
    assert len(program.seconds_after) == len(program.timeline_after)
    chosen, fastest = (point.seconds for point in (next(p for p in training.curve if p.chosen), training.curve[0]))
    assert sum(program.seconds_before) == pytest.approx(fastest, rel=0.1)
    assert sum(program.seconds_after) == pytest.approx(chosen, rel=0.1)


def test_what_a_rewrite_replaced_has_its_time_too(training):
    """The loss in chunks: the timeline without a plan is of a graph that has it whole."""
    torch.manual_seed(0)
    model = models.build("gpt2", tiny=True).train()
    (program,) = memopt.plan(model, model.example_inputs(16, labels=True), training.minimum_bytes).programs
    assert {node.name for node in program.before.steps} - {node.name for node in program.after.steps}
    assert len(program.seconds_before) == len(program.timeline_before) and min(program.seconds_before) >= 0
    assert len(program.seconds_after) == len(program.timeline_after)


def test_tensors_that_one_line_makes_in_each_block_share_a_row(training):
    (program,), (view,) = training.programs, report_view(training)["programs"]
    assert sum(len(row[1]) for row in view["decisions"]) == len(program.saved) + len(program.recomputed)
    assert sum(row[2] for row in view["decisions"]) == sum(row.bytes for row in (*program.saved, *program.recomputed))
    several = [row for row in view["decisions"] if len(row[1]) > 1]
    assert any(row[4] == "blocks.*.attention" for row in several)
    assert not any("L['" in row[4] for row in view["decisions"])


def test_a_report_without_graphs_or_times_is_shown(training):
    row = TensorRow("x", 4, "model.py:3, relu(x)")
    program = ProgramReport("graph 0", "training", 2, (1, 2), (1, 2), (row, row), (), 1)
    report = from_json(to_json(dataclasses.replace(training, programs=(program,))))
    (view,) = report_view(report)["programs"]
    assert view["decisions"] == [["kept", ["x", "x"], 8, None, "", "model.py:3, relu(x)"]]
    assert view["seconds"] == [[], []]
