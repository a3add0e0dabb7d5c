"""Where the batch lies after operators that move entries about, or why it cannot be said."""

import pytest
import torch

from memopt.patterns.batch import Batched, find_batch
from tests.passes.build import trace

X = torch.randn(4, 3, 2)


def batch_of(function, *tensors):
    """What becomes of the batch in the function's last operator: where it lies, or the reason why nothing is known."""
    program = trace(lambda *given: (function(*given),), *tensors)
    batch, last = find_batch(program), program.calls[-1]
    return batch.reasons.get(last) or batch.states[last], batch.rules.get(last)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.view(12, 2), Batched(0, 3)),
        (lambda x: x.view(4, 6), Batched(0)),
        (lambda x: x.view(1, 4, 6), Batched(1)),
        (lambda x: x.transpose(0, 1), Batched(1)),
        (lambda x: x.transpose(-1, -2), Batched(0)),
        (lambda x: x.permute(2, 0, 1), Batched(1)),
        (lambda x: x.unsqueeze(0), Batched(1)),
        (lambda x: x.unsqueeze(1), Batched(0)),
        (lambda x: x.unsqueeze(0).squeeze(0), Batched(0)),
        (lambda x: x[:, :1].squeeze(1), Batched(0)),
        (lambda x: x.expand(5, 4, 3, 2), Batched(1)),
        (lambda x: x.repeat(1, 2, 1), Batched(0)),
        (lambda x: x.repeat(2, 1, 1, 1), Batched(1)),
        (lambda x: x.select(1, 0), Batched(0)),
        (lambda x: x.transpose(0, 1).select(0, 1), Batched(0)),
        (lambda x: x[:, 1:], Batched(0)),
        (lambda x: x.flip(1), Batched(0)),
        (lambda x: torch.cat((x, x + 1), 1), Batched(0)),
        (lambda x: x.view(12, 2).transpose(0, 1), Batched(1, 3)),
        (lambda x: x.exp().mean(1, keepdim=True).as_strided((4, 1, 2), (2, 7, 1)), Batched(0)),
    ],
)
def test_the_batch_is_followed(function, expected):
    assert batch_of(function, X)[0] == expected


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.transpose(0, 1).reshape(12, 2), "merges the batch with a dimension before it, or splits it"),
        (lambda x: x.view(2, 2, 6), "merges the batch with a dimension before it, or splits it"),
        (lambda x: x.select(0, 1), "which is the batch"),
        (lambda x: x.flip(0), "which is the batch"),
        (lambda x: x[1:], "takes a part of the batch"),
        (lambda x: x.repeat(2, 1, 1), "repeat makes copies of samples"),
        (lambda x: torch.cat((x, x)), "which is the batch"),
        (lambda x: x.as_strided((4, 3, 2), (6, 1, 3)), "looks at memory otherwise"),
        (lambda x: x.as_strided((4, 6), (6, 1)), "looks at memory otherwise"),
        (lambda x: x.transpose(0, 1).as_strided((3, 4, 2), (2, 6, 1)), "looks at memory otherwise"),
        (lambda x: torch.ops.aten.squeeze.default(x), "would take the batch away where it is 1"),
    ],
)
def test_what_mixes_samples_or_might_is_refused(function, reason):
    found, _ = batch_of(function, X)
    assert isinstance(found, str) and reason in found


def test_sizes_among_the_arguments_are_those_of_a_chunk():
    _, rule = batch_of(lambda x: x.view(12, 2), X)
    assert rule.resize(1) == {1: [3, 2]} and rule.resize(2) == {1: [6, 2]}
    _, rule = batch_of(lambda x: x[:, None].expand(4, 5, 3, 2), X)
    assert rule.resize(3) == {1: [3, 5, 3, 2]}
    _, rule = batch_of(lambda x: torch.ops.aten.slice.Tensor(x, 0, 0, 4), X)
    assert rule.resize(3) == {2: 0, 3: 3}


def test_parts_of_a_concatenation_that_do_not_depend_on_the_batch_are_sliced():
    program = trace(lambda x: (torch.cat((x, torch.zeros(4, 1, 2)), 1),), X)
    cat = program.calls[-1]
    (zeros,) = [node for node in cat.all_input_nodes if node.op == "call_function"]
    assert find_batch(program).rules[cat].slices == {zeros: Batched(0)}
