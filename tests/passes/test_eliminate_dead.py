"""EliminateDead: what goes, what stays, and why."""

from __future__ import annotations

import torch
from torch import nn

from memopt.passes.eliminate_dead import EliminateDead
from memopt.program import InputKind
from tests.passes.build import capture_joint, check, reasons, trace
from tests.support import capture, targets

aten = torch.ops.aten
X = torch.arange(12.0).reshape(3, 4)


def test_a_dead_node_goes_with_what_only_it_read() -> None:
    program = trace(lambda x: (x.relu(), x.sin().cos() + x.exp()), X, keep=1)
    assert targets(program) == ["aten.relu.default", "aten.sin.default", "aten.cos.default", "aten.exp.default",
                                "aten.add.Tensor"]  # fmt: skip
    result = check(EliminateDead(), program, X)
    assert targets(result.program) == ["aten.relu.default"]
    (change,) = result.changes
    assert change.before == ("sin", "cos", "exp", "add")
    assert change.after == ()
    assert change.summary == "removed 4 dead nodes and 0 unused constants"
    assert result.refusals == ()


def test_what_a_live_node_reads_too_stays() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared = x.sin()
        return shared + 1, shared.cos()

    result = check(EliminateDead(), trace(function, X, keep=1), X)
    assert targets(result.program) == ["aten.sin.default", "aten.add.Tensor"]


def test_a_program_without_dead_nodes_is_returned_as_it_is() -> None:
    program = trace(lambda x: (x.relu(),), X)
    result = EliminateDead().run(program)
    assert result.program is program
    assert result.changes == () and result.refusals == ()


def test_an_unread_item_goes_and_the_operation_stays() -> None:
    program = trace(lambda x: aten.native_layer_norm(x, [4], None, None, 1e-5), X, keep=1)
    assert [node.name for node in program.calls] == ["native_layer_norm", "getitem", "getitem_1", "getitem_2"]
    result = check(EliminateDead(), program, X)
    assert [node.name for node in result.program.calls] == ["native_layer_norm", "getitem"]


def test_an_operation_goes_when_all_its_items_are_unread() -> None:
    program = trace(lambda x: (x.relu(), *aten.native_layer_norm(x, [4], None, None, 1e-5)), X, keep=1)
    assert targets(check(EliminateDead(), program, X).program) == ["aten.relu.default"]


def test_a_dead_draw_stays_for_the_sake_of_later_draws() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = torch.rand_like(x), torch.rand_like(x)
        return second * x, first

    program = trace(function, X, keep=1)
    result = check(EliminateDead(), program, X)
    assert result.program is program
    assert reasons(result) == {
        "rand_like": "nothing reads it, but it draws random numbers: without it every later draw would change"
    }


def test_what_a_dead_draw_reads_stays_and_what_reads_it_goes() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.relu(), aten.native_dropout(x.sin(), 0.5, True)[0].cos()

    result = check(EliminateDead(), trace(function, X, keep=1), X)
    assert targets(result.program) == ["aten.relu.default", "aten.sin.default", "aten.native_dropout.default"]
    assert set(reasons(result)) == {"native_dropout"}


def test_assertions_stay_and_are_no_refusal() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float32).relu()

    program = capture(Model(), X)
    assert "aten._assert_tensor_metadata.default" in targets(program)
    result = check(EliminateDead(), program, X)
    assert result.program is program
    assert result.refusals == ()


def test_an_unread_higher_order_operator_stays() -> None:
    class Model(nn.Module):
        def forward(self, flag: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            chosen = torch.cond(flag, lambda v: v.sin(), lambda v: v.cos(), (x,))
            return x.relu(), chosen

    flag = torch.tensor(True)
    program = capture(Model(), flag, X).copy()
    program.graph.output_node().args = (program.output_nodes[:1],)
    program = program.finish(outputs=program.outputs[:1])
    result = check(EliminateDead(), program, flag, X)
    assert "cond" in " ".join(targets(result.program))
    assert any("does more than compute its value" in reason for reason in reasons(result).values())


def test_unused_constants_go_with_their_values() -> None:
    kinds = {1: InputKind.CONSTANT, 2: InputKind.CONSTANT}
    program = trace(lambda x, c, d: (x + d, x + c), X, X + 1, X + 2, kinds=kinds, keep=1)
    result = check(EliminateDead(), program, X)
    assert [entry.name for entry in result.program.inputs] == ["x_1", "d_1"]
    assert set(result.program.state) == {"d_1"}
    assert result.changes[0].before == ("add_1", "c_1")
    assert result.changes[0].summary == "removed 1 dead nodes and 1 unused constants"


def test_an_unused_constant_alone_is_reason_enough() -> None:
    program = trace(lambda x, c: (x.relu(),), X, X + 1, kinds={1: InputKind.CONSTANT})
    result = check(EliminateDead(), program, X)
    assert [entry.name for entry in result.program.inputs] == ["x_1"]
    assert dict(result.program.state) == {}


def test_unused_inputs_of_other_kinds_stay() -> None:
    kinds = {1: InputKind.PARAMETER, 2: InputKind.BUFFER}
    program = trace(lambda x, p, b, u: (x.relu(), p + b + u), X, X, X, X, kinds=kinds, keep=1)
    result = check(EliminateDead(), program, X, X, X, X)
    assert [entry.kind for entry in result.program.inputs] == [
        InputKind.USER, InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER
    ]  # fmt: skip
    assert set(result.program.state) == {"p_1", "b_1"}
    assert result.program.baked == frozenset()


def test_a_program_may_end_up_with_no_calls() -> None:
    result = check(EliminateDead(), trace(lambda x: (x, x.relu()), X, keep=1), X)
    assert result.program.calls == []


def test_positions_of_the_others_stay() -> None:
    program = trace(lambda x: (x.relu() + x.sin(), x.exp(), x.cos() * 2), X)
    new = program.copy()
    new.graph.output_node().args = ([new.output_nodes[0], new.output_nodes[2]],)
    program = new.finish(outputs=new.outputs[:2])
    result = check(EliminateDead(), program, X)
    assert [node.name for node in result.program.calls] == ["relu", "sin", "add", "cos", "mul"]


def test_phases_of_a_training_program_stay() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    program = capture_joint(lambda w, x: (x @ w).relu().sum(), weight, X)
    new = program.copy()
    with new.graph.inserting_before(new.graph.output_node()):
        dead = new.graph.call_function(aten.sin.default, (new.calls[0],))
        new.graph.call_function(aten.cos.default, (dead,))
    program = new.finish()
    result = check(EliminateDead(), program, weight, X)
    assert result.changes[0].before == ("sin_default", "cos_default")
    assert all("phase" in node.meta for node in result.program.calls)


def test_a_large_graph_takes_linear_time() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x
        for _ in range(1000):
            y = y.sin()
        return x.relu(), y

    result = EliminateDead().run(trace(function, X, keep=1))
    assert len(result.program.calls) == 1
    assert len(result.changes[0].before) == 1000
