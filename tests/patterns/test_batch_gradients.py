"""What operators of a backward pass do to the batch: parts of it give parts of their results, or of their sums."""

import operator

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from memopt.patterns.batch import Batched, NotBatched, Summed
from memopt.patterns.batch_gradients import RULES, gradient_rule
from memopt.program import InputKind
from tests.passes.build import trace

aten = torch.ops.aten
N = 6


def gradient_of(function, *shapes):
    """The operators of a gradient, and two arguments: each tensor, and the gradient of the result."""

    def backward(*tensors):
        inputs = [t.detach().requires_grad_() for t in tensors[:-1]]
        return torch.autograd.grad(function(*inputs), inputs, tensors[-1])

    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    result = torch.randn(function(*tensors).shape, generator=generator)
    return trace(backward, *tensors, result), [*tensors, result]


CASES = {
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), (N, 3, 8, 8), (4, 3, 3, 3)),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (N, 3, 8, 8), (3, 4, 2, 2)),
    "grouped": (lambda x, w: F.conv2d(x, w, groups=3), (N, 3, 8, 8), (9, 1, 3, 3)),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (N, 3, 8, 8)),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2), (N, 3, 8, 8)),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (N, 3, 8, 8)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (N, 3, 8, 8)),
    "bilinear": (lambda x: F.interpolate(x, (5, 7), mode="bilinear"), (N, 3, 8, 8)),
    "bicubic": (lambda x: F.interpolate(x, (5, 7), mode="bicubic"), (N, 3, 8, 8)),
    "line": (lambda x: F.interpolate(x, 9), (N, 3, 8)),
    "nearest_exact": (lambda x: F.interpolate(x, (5, 7), mode="nearest-exact"), (N, 3, 8, 8)),
    "trilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (N, 3, 4, 4, 4)),
    "antialias": (lambda x: F.interpolate(x, (5, 7), mode="bilinear", antialias=True), (N, 3, 8, 8)),
    "reflected": (lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect"), (N, 3, 8, 8)),
    "replicated": (lambda x: F.pad(x, (1, 2, 1, 0), mode="replicate"), (N, 3, 8, 8)),
    "grid": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), (N, 3, 8, 8), (N, 5, 7, 2)),
    "softmax": (lambda x: x.softmax(1), (N, 5)),
    "log_softmax": (lambda x: x.log_softmax(-1), (N, 5)),
    "scale": (lambda x, b: x * b, (N, 3, 4, 4), (1, 3, 1, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_of_the_batch_give_parts_of_gradients(name):
    function, *shapes = CASES[name]
    program, tensors = gradient_of(function, *shapes)
    states = {node: Batched(0) if node.meta["val"].shape[0] == N else None for node in program.placeholders}
    used = set()
    for node in program.calls:
        rule = gradient_rule(node, states, N)
        states[node] = rule.state if node.target is not operator.getitem else states[node.args[0]][node.args[1]]
        used.update({node.target} & set(RULES))
        assert not rule.slices
    assert used
    whole = program.run(*tensors)
    parts = []
    for start in (0, 2):
        part = program.copy()
        span = slice(start, start + (2 if start == 0 else 4))
        given = [t[span] if t.shape[0] == N else t for t in tensors]
        for node in part.calls:
            old = next(n for n in program.calls if n.name == node.name)
            rule = gradient_rule(old, states, N) if old.target is not operator.getitem else None
            if rule is not None and rule.resize is not None:
                changed = list(node.args)
                for position, argument in rule.resize(span.stop - span.start).items():
                    changed[position] = argument
                node.args = tuple(changed)
        part.graph_module.recompile()
        parts.append(fx.Interpreter(part.graph_module).run(*given, enable_io_processing=False))
    for value, node, *pieces in zip(whole, program.output_nodes, *parts, strict=True):
        together = sum(pieces) if states[node] == Summed() else torch.cat(pieces, states[node].dim)
        torch.testing.assert_close(together, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "shapes", "reason"),
    [
        (lambda x: x.softmax(0), [(N, 5)], "which is the batch"),
        (lambda x, w: F.conv2d(x, w), [(N, 3, 8, 8), (N, 3, 3, 3)], "a batch in (detach|alias)"),
        (lambda x: x.sum(), [(N, 5)], ""),
    ],
)
def test_what_mixes_samples_is_refused(function, shapes, reason):
    program, _ = gradient_of(function, *shapes)
    states = {
        node: Batched(0) if node.meta["val"].dim() and node.meta["val"].shape[0] == N else None
        for node in program.placeholders
    }
    if not reason:  # a sum's gradient is one number for all samples
        assert all(gradient_rule(node, states, N).state is None for node in program.calls if node.all_input_nodes[1:])
        return
    with pytest.raises(NotBatched, match=reason):
        for node in program.calls:
            states[node] = gradient_rule(node, states, N).state


def test_sums_at_places_stay_with_their_samples():
    def function(places, values, total):
        rows = torch.scatter_add(torch.zeros(3 * N, 9), 1, places.view(3 * N, 4), values.view(3 * N, 4))
        return rows, torch.scatter_add(total, 1, places.view(3 * N, 4), values.view(3 * N, 4))

    places, values = torch.zeros(N, 3, 4, dtype=torch.int64), torch.ones(N, 3, 4)

    def rules(total, **changed):
        program = trace(function, places, values, total, kinds={})
        states = {node: Batched(0) for node in program.placeholders}
        states[program.placeholders[2]] = changed.get("state", Batched(0, 3))
        found = {}
        for node in program.calls:
            found[node] = gradient_rule(node, states, N)
            states[node] = found[node].state
        return [rule for node, rule in found.items() if node.target is aten.scatter_add.default]

    first, second = rules(torch.ones(3 * N, 9))
    assert first.state == second.state == Batched(0, 3)
    assert list(first.slices.values()) == [Batched(0, 3)] and not second.slices, "of what is whole, a part's rows"
    for total, state in ((torch.ones(3 * N, 9), Batched(0)), (torch.ones(4 * N, 9), None)):
        with pytest.raises(NotBatched, match=r"differently|fewer rows"):
            rules(total, state=state)


def test_sums_over_other_dimensions_stay_with_their_samples():
    program = trace(lambda x: (x.sum((1, 2)), x.sum((0, 2), keepdim=True)), torch.ones(N, 3, 4), kinds={})
    assert program.inputs[0].kind is InputKind.USER
    states = {program.placeholders[0]: Batched(0)}
    assert [gradient_rule(node, states, N).state for node in program.calls] == [Batched(0), Summed()]
