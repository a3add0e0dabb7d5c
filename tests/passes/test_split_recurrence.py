"""SplitRecurrence: backward through a recurrent layer piece by piece, eager's numbers, and less memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from memopt.memory.cost.table import CostTable
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.split_recurrence import SplitRecurrence
from memopt.torch_compat.recurrent_layers import RECURRENT, RECURRENT_BACKWARD
from tests.end_to_end import gradients
from tests.passes.build import arguments, capture_joint, reasons, trace
from tests.support import apply


def program(kind=nn.GRU, length=12, layers=1, bidirectional=False):
    torch.manual_seed(0)
    module = kind(4, 8, layers, bidirectional=bidirectional)
    x, weights = torch.randn(length, 3, 4), [weight.detach().requires_grad_() for weight in module.parameters()]
    count = 2 if kind is nn.LSTM else 1

    def loss(x, *weights):
        states = [x.new_zeros(layers * (1 + bidirectional), 3, 8)] * count
        found = RECURRENT(x, states, list(weights), module.mode, True, layers, True, bidirectional, None)
        return found[0].square().sum() + found[1].sum()

    return EliminateCopies().run(capture_joint(loss, x, *weights)).program, (x, *weights)


def split(item, joint, given):
    """The pass's result, whose numbers are those of before but for rounding."""
    result = apply(item, joint)
    values = arguments(joint, *given)
    torch.testing.assert_close(result.program.run(*values), joint.run(*values))
    return result


def measured(graph):
    (node,) = [node for node in graph.calls if node.target is RECURRENT_BACKWARD]
    return CostTable().measure(node)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_pieces_take_less_and_give_the_same(kind, bidirectional):
    joint, given = program(kind, 40, bidirectional=bidirectional)
    result = split(SplitRecurrence(4, share=0.0), joint, given)
    assert len(result.changes) == 1 and "40 steps in 4 pieces" in result.changes[0].summary
    assert measured(result.program) < 0.75 * measured(joint)


def test_arguments_as_dynamo_saw_them_are_forgotten_where_others_stand_there():
    joint, _ = program()
    for node in joint.calls:
        node.meta["eager_input_vals"] = (node.args, {})
    changed = SplitRecurrence(share=0.0).run(joint).program
    seen = {node.target: "eager_input_vals" in node.meta for node in changed.calls}
    assert not seen[RECURRENT] and not seen[RECURRENT_BACKWARD] and any(seen.values())


def test_no_more_pieces_than_steps():
    joint, given = program(length=3)
    assert "3 steps in 3 pieces" in split(SplitRecurrence(16, share=0.0), joint, given).changes[0].summary


def test_refusals():
    with pytest.raises(ValueError, match="at least 2"):
        SplitRecurrence(1)
    joint, given = program(layers=2, bidirectional=True)
    assert "two directions" in str(reasons(split(SplitRecurrence(share=0.0), joint, given)))
    joint, given = program(length=1)
    assert "a sequence of length 1" in str(reasons(split(SplitRecurrence(share=0.0), joint, given)))
    joint, given = program()
    assert "within it" in str(reasons(split(SplitRecurrence(share=10.0), joint, given)))
    joint, given = program()
    assert SplitRecurrence().deeper.pieces == 16 and SplitRecurrence().deeper.deeper is None
    inference = trace(lambda x: (x.exp(),), torch.ones(3))
    assert SplitRecurrence().run(inference).program is inference


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).square().mean()


@pytest.mark.parametrize("budget", [0.6])
def test_a_budget_that_a_whole_layer_does_not_keep_is_kept_in_pieces(budget):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 64, 8)
    model(x).backward()
    expected = gradients(model)
    model.zero_grad()
    run = memopt.compile(model, budget, backend="aten")
    run(x).backward()
    torch.testing.assert_close(gradients(model), expected)
    report = run.report
    assert report.peak_bytes <= report.budget_bytes < report.unconstrained_bytes
    assert report.measured_peak_bytes <= report.peak_bytes
    assert [len(item.changes) for item in report.passes if item.name == "split_recurrence"] == [1]
