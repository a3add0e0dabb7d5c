"""What is kept of a program: its nodes known by provenance, their work, and the memory they take."""

import dataclasses
import gc
import weakref

import pytest
import torch

import memopt
from memopt import models
from memopt.difference.graph_diff import align
from memopt.graph.record import GraphRecord, NodeRecord, StorageRecord
from memopt.graph.snapshot import snapshot
from memopt.memory.cost.roofline import bytes_moved, flops
from memopt.memory.timeline import timeline
from memopt.pass_manager import Change, Pass, PassManager, PassResult
from memopt.program import InputKind
from tests.passes.build import trace
from tests.support import capture

aten = torch.ops.aten
X = torch.linspace(-2, 2, 12).reshape(3, 4)


def simple():
    return trace(lambda x, w: (x.relu() * w,), X, torch.ones(4), kinds={1: InputKind.PARAMETER})


class Swap(Pass):
    """Puts clamp_min in place of relu, in a new node of the old name or of another."""

    name = "swap"

    def __init__(self, name="clamp", operator=aten.clamp_min.default, arguments=(0,)):
        self.node_name, self.operator, self.arguments = name, operator, arguments

    def run(self, program):
        new = program.copy()
        (old,) = [node for node in new.calls if "relu" in node.name or "clamp" in node.name]
        with new.graph.inserting_before(old):
            made = new.graph.call_function(self.operator, (old.args[0], *self.arguments))
        old.replace_all_uses_with(made)
        new.graph.erase_node(old)
        made.name = self.node_name
        return PassResult(new.finish(), (Change("swapped", (old.name,), (made.name,)),))


def by_name(record):
    return {node.name: node for node in record.nodes}


def test_nodes_of_a_program():
    record = snapshot(simple())
    nodes = by_name(record)
    assert [node.operator for node in record.nodes] == ["input", "parameter", "aten.relu", "aten.mul.Tensor", "output"]
    assert nodes["mul"].inputs == ("relu", record.nodes[1].name)
    assert nodes["mul"].result == "float32[3, 4]"
    assert nodes["relu"].moved == 2 * 48
    assert nodes["mul"].moved == 2 * 48 + 16
    assert [node.name for node in record.steps] == ["relu", "mul"]


def test_work_is_that_of_the_cost_model():
    program = capture(models.build("resnet50", tiny=True).eval(), torch.randn(2, 3, 32, 32))
    record = snapshot(program)
    assert record.flops == sum(flops(node) for node in program.calls) > 0
    assert record.moved > 0
    convolution = next(node for node in program.calls if node.target is aten.convolution.default)
    assert by_name(record)[convolution.name].moved == bytes_moved(convolution)


def test_a_formula_that_refuses_its_operands_counts_nothing(monkeypatch):
    def refuse(node):
        raise AssertionError("shapes are incompatible")

    monkeypatch.setattr("memopt.graph.snapshot.flops", refuse)
    nodes = by_name(snapshot(simple()))
    assert (nodes["mul"].flops, nodes["mul"].moved) == (0, 2 * 48 + 16)


@pytest.mark.parametrize("train", [False, True])
def test_memory_is_that_of_the_timeline(train):
    model = models.build("gpt2", tiny=True).train(train)
    report = memopt.plan(model, model.example_inputs(2, labels=train))
    for item in report.passes:
        if item.before is not None:
            assert (item.before is item.after) == (not item.changes)
    (program,) = report.programs
    resident = report.breakdown.parameters + report.breakdown.buffers + report.breakdown.inputs
    for line, graph in ((program.timeline_before, program.before), (program.timeline_after, program.after)):
        above = [total - live for total, live in zip(line, graph.live_bytes, strict=True)]
        assert min(above) == resident  # and more where an operator takes workspace


def test_memory_of_one_program_step_by_step():
    program = capture(models.build("densenet121", tiny=True).eval(), torch.randn(1, 3, 32, 32))
    assert snapshot(program).live_bytes == timeline(program).live_bytes
    assert snapshot(program).peak_bytes == timeline(program).peak_bytes


def test_a_new_node_of_another_name_says_what_it_stands_for():
    _, (record,) = PassManager([Swap("clamp")], record=True).run(simple())
    assert by_name(record.after)["clamp"].origins == ("relu",)
    assert record.after.nodes[0] is record.before.nodes[0]


def test_a_name_given_again_is_another_node():
    """Three passes: relu becomes clamp, clamp is called relu again, and that is not the first relu."""
    passes = [Swap("clamp"), Swap("relu", aten.threshold.default, (0.0, 0.0))]
    _, (first, second) = PassManager(passes, record=True).run(simple())
    assert by_name(first.before)["relu"].id == "relu"
    again = by_name(second.after)["relu"]
    assert again.id == "relu~2"
    assert again.origins == ("clamp",)

    class Recycle(Swap):
        def run(self, program):
            result = super().run(program)
            return PassResult(result.program, (Change("gone", ("relu",), ("mul",)),))

    _, (record,) = PassManager([Recycle("relu", aten.clamp_min.default)], record=True).run(simple())
    assert by_name(record.before)["relu"].id == "relu"
    assert by_name(record.after)["relu"].id == "relu~2"
    assert by_name(record.after)["mul"].inputs[0] == "relu~2"
    alignment = align(
        [node.as_graph_node() for node in record.before.nodes], [node.as_graph_node() for node in record.after.nodes],
        names=True,
    )  # fmt: skip
    assert alignment.counts()["removed"] == alignment.counts()["added"] == 1


def test_ids_go_on_in_another_manager():
    program, records = PassManager([Swap("clamp")], record=True).run(simple())
    _, (record,) = PassManager([Swap("third")], record=True).run(program, records)
    assert record.before == records[-1].after
    assert by_name(record.after)["third"].origins == ("clamp",)


def test_nothing_is_recorded_unasked():
    _, (record,) = PassManager([Swap()]).run(simple())
    assert record.before is None
    assert record.after is None


def test_no_program_and_no_weight_is_kept_alive():
    program = simple()
    dead = weakref.ref(program)
    record = snapshot(program)
    del program
    gc.collect()
    assert dead() is None
    assert all(isinstance(value, (str, int, tuple)) for node in record.nodes for value in dataclasses.astuple(node))


def test_live_bytes_of_overlapping_storages():
    nodes = tuple(NodeRecord(name, name, "aten.relu") for name in "abc")
    record = GraphRecord(nodes, (StorageRecord("a", 10, 0, 2), StorageRecord("b", 5, 1, 3)), 3)
    assert record.live_bytes == (10, 15, 5)
    assert record.peak_bytes == 15
    assert GraphRecord(nodes, unknown="no shapes").peak_bytes is None


@pytest.mark.parametrize("name", ["gpt2_medium", "resnet18"])
def test_work_is_counted_once_and_is_that_of_each_graph_alone(monkeypatch, name):
    from memopt.graph import snapshot as module

    model = models.build(name, tiny=True)
    program = capture(model, **model.example_inputs(2))
    counted, plain = [], module._work

    def work(node):
        counted.append(node.name)
        return plain(node)

    monkeypatch.setattr(module, "_work", work)
    result, records = PassManager(memopt.INFERENCE, False, record=True).run(program)
    assert len(records) > 4 and len(counted) < 2 * len(program.graph.nodes)
    monkeypatch.undo()
    figures = {node.name: (node.flops, node.moved) for node in records[-1].after.nodes}
    module._KNOWN.clear()
    assert figures == {node.name: (node.flops, node.moved) for node in snapshot(result).nodes}
