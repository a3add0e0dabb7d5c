"""Gradients in the place of logits: where it is done, what it takes, and what the code does."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code

from memopt.inductor import write_over as engine
from memopt.inductor.fusion import InductorFusion
from memopt.inductor.peak_estimate import expected_bytes
from memopt.inductor.write_over import register_write_over
from memopt.memory.cost.table import CostTable
from memopt.memory.timeline import timeline
from memopt.passes.chunk_loss import ChunkLoss
from memopt.patterns.write_over import WRITE_OVER
from memopt.program import Phase
from tests.inductor.test_peak_lower_bound import graph_of, needs_compiler
from tests.passes.build import arguments, capture_joint, trace

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    monkeypatch.setattr(engine, "_LEAST_BYTES", 1)


def marked(program):
    for node in program.calls:
        node.meta.setdefault("phase", Phase.FORWARD)
    return InductorFusion(CostTable()).mark(program)


def overs(program):
    return [node for node in program.calls if node.target is WRITE_OVER]


def spread(logits):
    """Something like a softmax, of nothing that a kernel on CPU would rather read twice than compute twice."""
    shifted = logits - logits.amax(1, True)
    return shifted * (shifted * shifted).sum(1, True)


def loss_and_gradient(x, w, labels):
    """A loss, and the gradient of the logits that it is computed from, multiplied by the weight."""
    logits = x @ w
    found = spread(logits)
    return found.gather(1, labels), (found * 2 - 1) @ w.t()


def inputs(rows=64, columns=64):
    return torch.randn(rows, 8), torch.randn(8, columns), torch.randint(0, columns, (rows, 1))


def test_a_gradient_takes_the_place_of_logits_that_a_loss_reads_too():
    program = trace(loss_and_gradient, *inputs())
    (over,) = overs(marked(program))
    base, value, after = over.args
    assert base.target is aten.mm.default and over.meta["inplace"] == 0 and value.meta["fused"]
    assert [node.target for node in after] == [aten.gather.default]
    size = 64 * 64 * 4
    assert timeline(marked(program)).peak_bytes <= size + 5000, "logits, and what is small"
    assert not overs(program), "the program itself stays as it is"


def test_marking_twice_changes_nothing():
    once = marked(trace(loss_and_gradient, *inputs()))
    twice = marked(once)
    assert [node.format_node() for node in twice.graph.nodes] == [node.format_node() for node in once.graph.nodes]


def test_every_chunk_of_a_loss_has_room_for_its_logits_only():
    x, weight = torch.randn(64, 4), torch.randn(400, 4)
    labels = torch.randint(0, 400, (64,))
    program = capture_joint(
        lambda x, w, t: F.cross_entropy(F.linear(x, w), t),
        x.requires_grad_(),
        weight.requires_grad_(),
        labels,
        decompositions=select_decomp_table(),
    )
    chunked = marked(ChunkLoss(4).run(program).program)
    assert len(overs(chunked)) == 4
    for over in overs(chunked):
        assert [tuple(node.meta["val"].shape) for node in over.args[2]] == [(16, 1)]


def test_what_something_else_needs_stays_where_it_is():
    x, w, labels = inputs()

    def later(x, w, labels):
        logits = x @ w
        found = spread(logits)
        gradient = (found * 2) @ w.t()
        return found.gather(1, labels), gradient, (logits * 2).sum(0)

    def given(x, w, labels):
        logits = x @ w
        found = spread(logits)
        return found.gather(1, labels), (found * 2) @ w.t(), logits

    def turned(x, w, labels):
        logits = x @ w
        return logits.gather(1, labels), (logits.t().exp() * 2) @ w.t()

    def flipped(x, w, labels):
        logits = x @ w
        return logits.gather(1, labels), (logits.flip(1).exp() * 2) @ w.t()

    def alone(x, w, labels):
        found = spread(x @ w)
        return ((found * 2) @ w.t(),)

    def of_a_sum(x, w, labels):
        logits = x @ w
        return logits.gather(1, labels), (logits.sum(1, True) * torch.ones(64, 64)) @ w.t(), logits.amax(1)

    for function in (later, given, turned, flipped, alone, of_a_sum):
        assert not overs(marked(trace(function, x, w, labels))), function.__name__


def test_small_values_stay_where_they_are():
    def function(x, w, labels, other):
        loss, gradient = loss_and_gradient(x, w, labels)
        return loss, gradient, (other @ other).sum(0)

    assert overs(marked(trace(function, *inputs(), torch.randn(64, 64))))
    assert not overs(marked(trace(function, *inputs(), torch.randn(128, 128))))


def test_what_another_phase_reads_stays():
    program = trace(loss_and_gradient, *inputs())
    product = next(node for node in program.calls if node.target is aten.mm.default)
    for node in program.calls:
        node.meta["phase"] = Phase.BACKWARD
    product.meta["phase"] = Phase.FORWARD
    assert not overs(marked(program))


def code_of(function, *tensors):
    """What the compiled function gives, and the names of the buffers that its matrix products write and read."""
    register_write_over()
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False):
        found, (code,) = run_and_get_code(torch.compile(function), *tensors)
    products = re.findall(r"extern_kernels\.mm\(([^,]*),.*out=(\w+)\)", code)
    return found, products


@needs_compiler
def test_the_code_computes_the_gradient_where_the_logits_were():
    program = marked(trace(loss_and_gradient, *inputs()))
    tensors = arguments(program, *inputs())
    true = loss_and_gradient(*(t.double() if t.is_floating_point() else t for t in tensors))
    found, products = code_of(program.graph_module, *tensors)
    ((_, logits), (gradient, _)) = products
    assert gradient == logits
    for mine, right in zip(found, true, strict=True):
        assert torch.allclose(mine.double(), right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


def read_later(x, w):
    product = x @ w
    over = WRITE_OVER(product, product * 2, [])
    return over @ w.t(), product.sum(0)


def read_elsewhere(x, w):
    product = x @ w
    return (WRITE_OVER(product, product.flip(1) * 2, []) @ w.t(),)


def of_the_caller(x, w):
    return (WRITE_OVER(x, x * 2, []) @ w,)


@needs_compiler
@pytest.mark.parametrize("function", [read_later, read_elsewhere, of_the_caller])
def test_what_may_not_be_written_over_in_the_graph_is_not(function):
    x, w, _ = inputs()
    before = x.clone()
    found, _ = code_of(function, x, w)
    assert torch.equal(x, before)
    for mine, right in zip(found, function(x, w), strict=True):
        assert torch.allclose(mine, right, rtol=1e-4, atol=1e-4)


def test_what_is_expected_of_a_phase_counts_one_of_both():
    x, w, labels = inputs()

    def forward(call, x, w, labels, *, over):
        logits = call(aten.mm.default, x, w)
        loss = call(aten.gather.default, logits, 1, labels)
        gradient = call(aten.exp.default, logits)
        if over:
            gradient = call(WRITE_OVER, logits, gradient, [loss])
        return loss, call(aten.mm.default, gradient, x), w

    nothing = graph_of({"w": w}, lambda call, w: [w])
    given = {"x": x, "w": w, "labels": labels}
    with_it, without = (
        expected_bytes(graph_of(given, functools.partial(forward, over=over)), nothing, 2) for over in (True, False)
    )
    assert with_it == 64 * 64 * 4 + 64 * 8 * 4 + labels.numel() * 4, "one of both, the loss and a product"
    assert without - with_it == 64 * 64 * 4 - 64 * 8 * 4, "both, and the loss; the product comes later"
