"""Attention as CUDA runs it, captured without CUDA."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memopt.api import make_options
from memopt.calls.tracing import collect
from memopt.capture.attention import attention_as_on
from memopt.compilation.session import Session
from memopt.memory.cost.devices import find
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import Resident
from memopt.memory.timeline import timeline
from memopt.models import build


def captured(model, inputs, target="h100"):
    session = Session(
        budget=None,
        backend=make_options(backend="aten", device=torch.device("cpu")).engine,
        passes=None,
        verify=False,
        names={},
        resident=Resident(),
        table=CostTable(target=find(target) if target else None),
    )
    (program,) = collect(model, (), inputs, session)
    return session.table.placed(program)


def kernels(program):
    named = [str(node.target).removeprefix("aten.").removesuffix(".default") for node in program.calls]
    return sorted({name for name in named if "attention" in name or name == "_safe_softmax"})


FLASH = ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"]
EFFICIENT = ["_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"]


class Attention(nn.Module):
    """Attention over its inputs; options go to scaled_dot_product_attention."""

    def __init__(self, **options):
        super().__init__()
        self.scale, self.options = nn.Parameter(torch.ones(())), options

    def forward(self, query, key, value, mask=None):
        scale = self.scale.to(query.dtype)
        return F.scaled_dot_product_attention(query * scale, key * scale, value * scale, mask, **self.options).sum()


def tensors(dtype=torch.bfloat16, heads=(4, 4), widths=(8, 8), **more):
    shapes = {"query": (2, heads[0], 16, widths[0]), "key": (2, heads[1], 16, widths[0])}
    shapes["value"] = (2, heads[1], 16, widths[1])
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()} | more


MASK = torch.ones(2, 1, 1, 16, dtype=torch.bool)
CASES = {
    "half": (Attention(), tensors(), FLASH),
    "dropout, causal": (Attention(dropout_p=0.1, is_causal=True), tensors(torch.float16), FLASH),
    "single": (Attention(dropout_p=0.1), tensors(torch.float32), EFFICIENT),
    "boolean mask": (Attention(), tensors(mask=MASK), EFFICIENT),
    "added mask": (Attention(), tensors(mask=torch.zeros(16, 16, dtype=torch.bfloat16)), EFFICIENT),
    "grouped": (Attention(enable_gqa=True), tensors(heads=(4, 2)), FLASH),
    "wide": (Attention(), tensors(widths=(264, 264)), EFFICIENT),
    "two widths": (Attention(), tensors(widths=(8, 16)), EFFICIENT),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_kernel_that_cuda_takes(case):
    model, inputs, expected = case
    program = captured(model, inputs)
    program.check()
    assert kernels(program) == expected


def test_other_shapes_are_not_fused():
    inputs = {name: tensor[0, 0] for name, tensor in tensors(torch.float32).items()}
    assert kernels(captured(Attention(dropout_p=0.1), inputs)) == ["_safe_softmax"]


def test_attention_inside_a_function_of_torch():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0].sum()

    inputs = {"x": torch.randn(2, 6, 16)}
    assert kernels(captured(Model(), inputs)) == EFFICIENT
    assert kernels(captured(Model(), inputs, None)) == ["_safe_softmax"]


def test_evaluation_keeps_nothing_for_backward():
    model = Attention().eval().requires_grad_(False)
    program = captured(model, tensors(torch.float32))
    (node,) = [node for node in program.calls if "attention" in str(node.target)]
    assert node.args[4] is False and node.meta["val"][1].numel() == 0


def test_matrices_of_scores_are_not_counted():
    model = build("gpt2", tiny=True, sequence=256, positions=256)
    inputs = model.example_inputs(2, labels=True)
    here, there = (timeline(captured(model, inputs, device)).peak_bytes for device in (None, "a100"))
    scores = 2 * 4 * 256 * 256 * 4
    assert there < here - 2 * scores


def test_outside_nothing_is_changed():
    plain = F.scaled_dot_product_attention
    query = torch.randn(1, 1, 4, 8)
    with attention_as_on(None), attention_as_on("cpu"):
        assert F.scaled_dot_product_attention is plain
    with pytest.raises(NotImplementedError), attention_as_on("cuda"):
        F.scaled_dot_product_attention(query, query, query)
    assert F.scaled_dot_product_attention is plain
    assert F.scaled_dot_product_attention(query, query, query).shape == query.shape
