"""A weight's gradient that Inductor's code adds up by products over the sum so far."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.graph import GraphLowering

import memopt
from memopt.memory.timeline import timeline
from memopt.passes import chunk_loss
from memopt.passes.chunk_loss import ChunkLoss
from memopt.passes.inplace import Inplace
from memopt.patterns import row_chunks
from memopt.patterns.product_sums import ADD_PRODUCT, WIDE_PRODUCT
from tests.backends.test_inductor_budget import eager_gradients
from tests.end_to_end import gradients, resident_bytes, restorer, step
from tests.inductor.test_fusion import marked
from tests.passes.build import capture_joint
from tests.passes.test_chunk_loss import assert_as_exact
from tests.support import apply


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    """On CPU, too, where products of half precision are made in float32."""
    torch._dynamo.reset()
    for module in (row_chunks, chunk_loss):
        monkeypatch.setattr(module, "in_float32", lambda factor: factor.dtype in (torch.bfloat16, torch.float16))


def distance(found, true):
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, true, strict=True))


def loss(x, w, t):
    return F.cross_entropy(F.linear(x, w), t)


def chunked(dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, weight = torch.randn(64, 4, dtype=dtype).requires_grad_(), torch.randn(40, 4, dtype=dtype).requires_grad_()
    labels = torch.randint(0, 40, (64,))
    before = capture_joint(loss, x, weight, labels)
    return before, apply(ChunkLoss(4), before).program, (x, weight, labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_are_added_by_products_and_rounded_once(dtype):
    before, program, tensors = chunked(dtype)
    exact = capture_joint(loss, *(t.detach().double().requires_grad_() for t in tensors[:2]), tensors[2])
    assert_as_exact(apply(ChunkLoss(4), before), before, tensors, exact)
    made = [node.target for node in program.calls if node.target in (WIDE_PRODUCT, ADD_PRODUCT)]
    assert made == [WIDE_PRODUCT, *[ADD_PRODUCT] * 3]


def test_the_sum_is_rounded_once_no_logits_are_left():
    _, program, _ = chunked()
    names = [node.name for node in program.calls]
    (rounded,) = [name for name in names if name.startswith("mm") and name.endswith("_rounded")]
    products = [index for index, node in enumerate(program.calls) if node.target is torch.ops.aten.mm.default]
    assert names.index(rounded) > max(products), "the last reads the gradient of the last chunk's logits"


def test_one_storage_holds_all_sums():
    _, program, _ = chunked()
    for planned in (marked(program), Inplace().run(program).program):
        sums = [node for node in planned.calls if node.target is ADD_PRODUCT]
        assert [node.meta.get("inplace") for node in sums] == [0, 0, 0]
    plain = timeline(program).peak_bytes
    assert timeline(Inplace().run(program).program).peak_bytes <= plain


@pytest.mark.long
def test_the_code_writes_over_the_sum(monkeypatch):
    written = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(written.append))
    torch.manual_seed(0)
    model = memopt.models.build("llama_1b", tiny=True, vocabulary=4096, width=64, layers=1).to(torch.bfloat16)
    inputs = model.example_inputs(32, labels=True)
    restore = restorer(model)
    true, eager = eager_gradients(copy.deepcopy(model).double(), inputs), eager_gradients(model, inputs)
    with pytest.raises(memopt.BudgetError) as refused:
        step(memopt.compile(model, resident_bytes(model, inputs), backend="inductor"), inputs)
    torch._dynamo.reset()
    compiled = memopt.compile(model, int(refused.value.minimum_bytes * 1.05), backend="inductor")
    step(compiled, inputs)
    found = gradients(model)
    restore()
    taken = {record.name: len(record.changes) for record in compiled.report.passes}
    assert taken["chunk_loss"] == 1 and not compiled.report.notes
    code = "".join(written)
    assert "add_product_into" in code and "add_product.default" not in code
    measured = resident_bytes(model, inputs) + memopt.measure(step, compiled, inputs).peak_bytes
    assert compiled.report.peak_bytes == pytest.approx(measured, rel=0.01)
    assert measured <= compiled.report.budget_bytes
    assert distance(found, true) <= 1.5 * distance(eager, true)
