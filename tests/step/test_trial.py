"""A trial step: what it measures, what it leaves alone, and what it says when it cannot run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memopt.backends.aten import emit
from memopt.memory.measure import measure
from memopt.memory.timeline import timeline
from memopt.program import InputKind
from memopt.step import trial as module
from memopt.step.planned import Planned
from memopt.step.trial import TrialError, bytes_beside, trial
from tests.passes.build import capture_joint, trace

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
SIZE = X.nbytes


def test_the_peak_of_an_inference_program() -> None:
    assert trial(trace(lambda x: (x.sin().cos().tanh(),), X)) == 2 * SIZE
    program = trace(lambda x: ((x.sin() + x.cos()).sum(),), X)
    assert trial(program) == measure(lambda: emit(program.graph_module)([X])).peak_bytes == 3 * SIZE


def test_tangents_are_made_where_backward_starts_and_counted() -> None:
    def function(x):
        for _ in range(3):
            x = x.sin()
        return (x,)

    program = capture_joint(function, X.clone().requires_grad_())
    text = str(program.graph)
    # Two saved sines are read again by backward's cosines; with the tangent and the product that makes five.
    assert trial(program) == timeline(program).peak_bytes
    kinds = [entry.kind for entry in program.inputs]
    assert InputKind.TANGENT in kinds and str(program.graph) == text


def test_tangents_are_not_there_during_forward() -> None:
    def function(x):  # forward holds four large values at once; backward its result, the tangent and the gradient
        y = x.detach()
        return (((y.sin() + y.cos()) * (y.exp() + y.tanh())).sum() * x,)

    program = capture_joint(function, X.clone().requires_grad_())
    assert trial(program) == timeline(program).peak_bytes == 4 * SIZE


def test_a_tangent_without_a_backward_step_is_made_at_the_end() -> None:
    program = capture_joint(lambda x: (x + 1,), X.clone().requires_grad_())
    assert SIZE <= trial(program) <= 3 * SIZE


def test_random_numbers_are_left_alone() -> None:
    program = capture_joint(lambda x: (F.dropout(x, 0.5).sin(),), X.clone().requires_grad_())
    state = torch.get_rng_state()
    trial(program)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_it_holds_beside_the_program_is_told() -> None:
    random = torch.get_rng_state().nbytes
    assert bytes_beside(trace(lambda x, y: (x.sin() + y,), X, X[0])) == random + SIZE + X[0].nbytes
    assert bytes_beside(capture_joint(lambda x: (x.sin(),), X.clone().requires_grad_())) == random  # X is there


def test_integers_are_valid_indices() -> None:
    program = trace(lambda table, index: (F.embedding(index, table),), X, torch.arange(10))
    assert trial(program) == 10 * 64 * 4


def test_weights_that_are_known_are_used_and_stay() -> None:
    matrix = torch.eye(64) * 4
    program = trace(lambda m, x: (torch.linalg.cholesky(m) @ x,), matrix, X, kinds={0: InputKind.PARAMETER})
    version = matrix._version
    assert trial(program) >= 2 * SIZE
    assert matrix._version == version and torch.equal(matrix, torch.eye(64) * 4)


def test_constants_are_part_of_the_program() -> None:
    program = trace(lambda c, x: (c + x,), X, X, kinds={0: InputKind.CONSTANT})
    assert trial(program) == SIZE


def test_operators_that_refuse_made_up_values_are_said_in_one_line() -> None:
    program = trace(lambda m: (torch.linalg.cholesky(m),), torch.eye(64))
    state = torch.get_rng_state()
    with pytest.raises(TrialError, match="LinAlgError: ") as caught:
        trial(program)
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_that_runs_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd more.")

    monkeypatch.setattr(module, "measure", full)
    with pytest.raises(TrialError, match=r"OutOfMemoryError: CUDA out of memory\. Tried to allocate 2 GiB\.$"):
        trial(trace(lambda x: (x.sin(),), X))


def test_faults_of_the_program_itself_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AssertionError("a fault")

    monkeypatch.setattr(module, "measure", broken)
    with pytest.raises(AssertionError, match="a fault"):
        trial(trace(lambda x: (x.sin(),), X))


def test_none_is_taken_of_a_graph_with_a_collective(monkeypatch) -> None:
    program = capture_joint(lambda x: (x.sin().sum(),), X.clone().requires_grad_())
    planned = Planned(program, program, program, timeline(program), timeline(program), (), {}, None, None, "", False)
    assert module.tried(planned).measured
    monkeypatch.setattr(module, "is_collective", lambda target: target is torch.ops.aten.sin.default)
    found = module.tried(planned)
    assert found.measured is None and "wait for the other ranks" in found.failure
