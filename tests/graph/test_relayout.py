"""A node laid out otherwise: through views, up to what sees the layout."""

import pytest
import torch

from memopt.graph.relayout import layout_is_unseen, replace_relaid
from tests.support import capture, run

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


class Case(torch.nn.Module):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def forward(self, x):
        return self.after(x + 1)


def relaid(after):
    """The program of `after(x + 1)`, its addition, and a node with the same values in transposed layout."""
    program = capture(Case(after), X).copy()
    node = next(node for node in program.calls if node.target is aten.add.Tensor)
    with program.graph.inserting_before(node):
        turned = program.graph.call_function(aten.t.default, (node.args[0],))
        turned.meta["val"] = node.meta["val"].t()
        moved = program.graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
        moved.meta["val"] = node.meta["val"].t().contiguous()
        back = program.graph.call_function(aten.t.default, (moved,))
        back.meta["val"] = moved.meta["val"].t()
        stands = program.graph.call_function(aten.add.Tensor, (back, 1))
        stands.meta["val"] = back.meta["val"].clone()
    return program, node, stands


@pytest.mark.parametrize(
    ("after", "unseen"),
    [
        (lambda y: y.t().clone(memory_format=torch.contiguous_format) * 2, True),
        (lambda y: y * 2, False),  # takes on its operand's layout
        (lambda y: y.view(6).clone(memory_format=torch.contiguous_format), False),  # no such view
        (lambda y: y, False),  # what is returned is seen
    ],
    ids=["copied", "computed-on", "viewed", "returned"],
)
def test_whether_a_layout_is_seen(after, unseen):
    program, node, stands = relaid(after)
    assert stands.meta["val"].stride() == (1, 2)
    assert layout_is_unseen(program, node, stands.meta["val"]) is unseen
    assert layout_is_unseen(program, node, node.meta["val"])


def test_the_copy_that_only_made_the_layout_contiguous_goes():
    program, node, stands = relaid(lambda y: y.t().clone(memory_format=torch.contiguous_format) * 2)
    replace_relaid(program, node, stands)
    new = program.finish()
    assert sum(item.target is aten.clone.default for item in new.calls) == 1  # the one that was put in
    assert torch.equal(run(new, X)[0], (X + 1).t() * 2)
