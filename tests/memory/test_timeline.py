"""The timeline of a program, by hand and beside the allocator's events of the aten backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from memopt.backends.aten import emit
from memopt.memory.aliasing import analyse
from memopt.memory.measure import measure
from memopt.memory.timeline import kept_bytes, lifetimes, timeline
from memopt.passes.inplace import Inplace
from memopt.program import InputKind, OutputKind, Program
from tests.passes.build import arguments, capture_joint, trace

X = torch.arange(24.0).reshape(4, 6)
SIZE = X.nbytes
W = torch.linspace(-1, 1, 36).reshape(6, 6)


def spans(program: Program) -> dict[str, tuple[int, int] | None]:
    aliasing = analyse(program)
    found = lifetimes(program, aliasing)
    return {s.producer.name: span for s, span in zip(aliasing.storages, found.spans, strict=True)}


def test_a_chain_holds_two_links() -> None:
    found = timeline(trace(lambda x: (x.sin().cos().tanh(),), X))
    assert found.steps == ("sin", "cos", "tanh")
    assert found.live_bytes == (SIZE, 2 * SIZE, 2 * SIZE)
    assert (found.peak_bytes, found.peak_step, found.forward_steps) == (2 * SIZE, 1, 3)
    assert found.live_at_peak == (("sin", SIZE), ("cos", SIZE))
    assert (found.end_bytes, found.saved_bytes) == (SIZE, 0)


def test_a_value_lives_until_its_last_reader_and_through_its_views() -> None:
    program = trace(lambda x: (x.sin()[0].cos() + x.exp()[1],), X)
    # sin, select, cos, exp, select, add
    assert spans(program) == {"x_1": None, "sin": (0, 3), "cos": (2, 6), "exp": (3, 6), "add": (5, 6)}


def test_the_largest_at_the_peak_come_first() -> None:
    program = trace(lambda x: (x[0].sin() + x.cos() + x.exp()[:1],), X)
    found = timeline(program)
    assert found.live_at_peak == (("add", SIZE), ("exp", SIZE), ("add_1", SIZE))
    found = timeline(program, {"cos": 1000})
    assert found.live_at_peak == (("cos", SIZE), ("sin", SIZE // 4))


def test_what_nobody_reads_dies_at_once_and_outputs_stay() -> None:
    program = trace(lambda x: (x.sin(), x.cos(), x.exp()), X, keep=1)
    assert spans(program) == {"x_1": None, "sin": (0, 3), "cos": (1, 2), "exp": (2, 3)}
    assert timeline(program).live_bytes == (SIZE, 2 * SIZE, 2 * SIZE)


def test_items_of_a_multiple_result_die_apart() -> None:
    program = trace(lambda x: (torch.sort(x)[0].sin().cos(),), X)
    found = timeline(program)
    assert found.steps == ("sort", "sin", "cos")
    # The indices (int64) die with the sort itself.
    assert found.live_bytes == (3 * SIZE, 2 * SIZE, 2 * SIZE)


def test_workspace_counts_while_its_operation_runs() -> None:
    found = timeline(trace(lambda x: (x.sin().cos().tanh(),), X), {"sin": 1000, "tanh": 7})
    assert found.live_bytes == (SIZE + 1000, 2 * SIZE, 2 * SIZE + 7)
    assert found.workspace_bytes == (1000, 0, 7)
    assert (found.peak_step, found.peak_bytes) == (0, SIZE + 1000)
    assert found.live_at_peak == (("sin", SIZE),)


def test_annotated_results_take_no_memory_of_their_own() -> None:
    program = Inplace().run(trace(lambda x: (x.sin().cos().tanh(),), X)).program
    assert timeline(program).live_bytes == (SIZE,) * 3


def test_inputs_and_their_views_are_resident() -> None:
    assert timeline(trace(lambda x: (x.t(), x[0]), X)).end_bytes == 0


def test_a_program_without_steps() -> None:
    found = timeline(trace(lambda x: (x,), X))
    assert (found.steps, found.peak_bytes, found.peak_step, found.live_at_peak) == ((), 0, -1, ())


# -- training ------------------------------------------------------------------------------------------------------


def joint(function: Callable[..., tuple[torch.Tensor, ...]]) -> Program:
    return capture_joint(function, X, W.clone().requires_grad_())


def test_saved_tensors_gradients_and_tangents() -> None:
    program = joint(lambda x, w: ((x @ w).tanh(),))
    found = timeline(program)
    kinds = {entry.name: entry.kind for entry in program.inputs}
    (tangent,) = [name for name, kind in kinds.items() if kind is InputKind.TANGENT]
    span = spans(program)
    assert span[tangent][0] == found.forward_steps, "a tangent appears where backward starts"
    assert span["mm"] == (0, 2), "the product is not needed once its tanh is known"
    assert found.saved_bytes == SIZE == found.live_bytes[1] - SIZE
    assert found.end_bytes == SIZE + W.nbytes, "the result and the weight's gradient"
    assert 0 < found.gradient_bytes_at_peak <= W.nbytes


def test_the_gradient_of_a_loss_is_held_by_the_engine() -> None:
    program = joint(lambda x, w: ((x @ w).tanh().sum(),))
    (tangent,) = [entry.name for entry in program.inputs if entry.kind is InputKind.TANGENT]
    steps = len(timeline(program).steps)
    assert spans(program)[tangent] == (timeline(program).forward_steps, steps)


def test_the_new_value_of_a_buffer_is_dropped_when_forward_returns() -> None:
    def function(x, w, total):
        total.add_(x)
        return ((x @ w).tanh(),)

    program = capture_joint(function, X, W.clone().requires_grad_(), torch.zeros(4, 6))
    (value,) = [
        value
        for output, value in zip(program.outputs, program.output_nodes, strict=True)
        if output.kind is OutputKind.MUTATION
    ]
    found = timeline(program)
    assert spans(program)[value.name] == (found.steps.index(value.name), found.forward_steps)
    assert found.saved_bytes == SIZE and found.end_bytes == SIZE + W.nbytes


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: ((x @ w).tanh(),),
        lambda x, w: ((x @ w).relu() @ w.sin(),),
        lambda x, w: (F.layer_norm((x @ w).exp(), (6,)).sin() * 2, (x @ w).cos()),
        lambda x, w: (F.softmax(x @ w, 1).cumsum(1).sin()[:, 1:],),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_the_peak_is_the_allocator_s(function: Callable[..., tuple[torch.Tensor, ...]], inplace: bool) -> None:
    for program in (trace(lambda x, w: function(x, w), X, W), joint(function)):
        program = Inplace().run(program).program if inplace else program
        values = arguments(program, X, W)
        run = emit(program.graph_module)
        found = timeline(program)
        measured = measure(lambda run=run, values=values: run(list(values)))
        tangents = sum(v.nbytes for v, e in zip(values, program.inputs, strict=True) if e.kind is InputKind.TANGENT)
        rows = 8 * 4 + 16  # what softmax takes for its rows, and numbers that become tensors for a moment
        assert measured.peak_bytes - rows <= found.peak_bytes <= measured.peak_bytes + tangents
        assert found.end_bytes == measured.end_bytes


def test_what_is_saved_stays_where_the_graph_is_kept() -> None:
    """Two squares: backward frees the first one's input only after both gradients of it are made."""
    program = capture_joint(lambda x, w: (x @ w).sin().cos().sum(), X, W.clone().requires_grad_())
    known = timeline(program)
    more = kept_bytes(program, known)
    assert more == 2 * SIZE
    assert more <= known.saved_bytes
