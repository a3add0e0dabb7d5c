"""Real models whose loss is computed in chunks train as eager does."""

import pytest
import torch
from torch import nn

import memopt
from memopt.passes.chunk_loss import ChunkLoss
from tests.end_to_end import build, gradients, in_dtype, restorer, step


class OnlyLoss(nn.Module):
    """A Hugging Face model whose caller wants its loss only."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs).loss


def real(name, dtype=torch.float32):
    torch._dynamo.reset()
    whole = name.endswith(", whole output")
    name = name.removesuffix(", whole output")
    model, inputs = build(name)
    if name.startswith("hf_") and not whole:
        model.loss_type = "ForCausalLM" if name == "hf_gpt2" else model.loss_type  # else it warns: a graph break
        model = OnlyLoss(model)
    return model.to(dtype).train(), in_dtype(inputs, dtype)


QUICK = ("gpt2", "hf_t5", "hf_llama, whole output")
OTHERS = (
    ("hf_gpt2", "aten"),
    ("hf_llama", "aten"),
    ("bert_base", "aten"),
    ("llama_tiny", "aten"),
    ("hf_bert", "aten"),
    ("llama_tiny", "inductor"),
)


# Inductor's code generator imports modules of torch that still use it.
@pytest.mark.quick("gpt2-aten")
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aten") for name in QUICK), ("hf_llama", "inductor")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS],
)
def test_real_models_train_as_eager_does(name, backend):
    double, inputs = real(name, torch.float64)
    exact = step(double, inputs)
    expected = gradients(double)
    model, inputs = real(name)
    restore = restorer(model)
    plain = step(model, inputs)
    eager = gradients(model)
    restore()
    passes = tuple(p for p in memopt.TRAINING if p.name != "checkpoint" and not p.lowers_floor)
    compiled = memopt.compile(model, backend=backend, passes=(*passes[:-1], ChunkLoss(4), passes[-1]))
    loss = step(compiled, inputs)
    (record,) = [r for r in compiled.report.passes if r.name == "chunk_loss"]
    assert len(record.changes) == 1 and record.evidence.proved == record.evidence.regions
    for new, old, true in zip([loss, *gradients(model)], [plain, *eager], [exact, *expected], strict=True):
        floor = 8 * torch.finfo(torch.float32).eps * true.abs().max()
        assert (new - true).abs().max() <= 2 * (old - true).abs().max() + floor
