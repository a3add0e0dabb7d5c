"""A region of rows in chunks: what each chunk reads, how their shares are added up, and the kernels that they run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.graph import GraphLowering

import memopt
from memopt.passes.chunk_loss import ChunkLoss
from tests.inductor.test_peak_lower_bound import needs_compiler
from tests.passes.build import capture_joint
from tests.passes.test_chunk_loss import ROWS, assert_as_exact, data
from tests.support import apply


def test_a_number_for_each_row_is_copied_where_its_chunk_begins():
    x, weight, _, labels = data()
    program = capture_joint(lambda x, w, t: F.cross_entropy(F.linear(x, w), t), x, weight, labels)
    calls = ChunkLoss(3).run(program).program.calls
    copies = [index for index, node in enumerate(calls) if node.target is torch.ops.aten.slice_copy.Tensor]
    assert copies and not len(copies) % 3
    assert {calls[index].meta["val"].shape.numel() for index in copies} == {ROWS // 3}
    ends = [index for index in copies if index + 1 not in copies]
    assert len(ends) == 3, "they stand together"
    for end in ends:  # and the chunk's rows and their product behind them, before anything is made of these
        assert [node.target for node in calls[end + 1 : end + 3]] == [
            torch.ops.aten.slice.Tensor,
            torch.ops.aten.mm.default,
        ]


@pytest.mark.parametrize(("chunks", "waiting"), [(3, 1), (4, 2), (6, 3), (6, 4)])
def test_shares_in_a_gradient_that_wait_for_each_other_are_rounded_once(chunks, waiting):
    torch.manual_seed(0)
    width = 48 // chunks // waiting  # as many take no more memory than a chunk of logits
    x = torch.randn(48, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(40, width, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 40, (48,))

    def loss(x, w, t):
        return F.cross_entropy(F.linear(x, w), t)

    before = capture_joint(loss, x, weight, labels)
    exact = capture_joint(loss, *(t.detach().double().requires_grad_() for t in (x, weight)), labels)
    result = apply(ChunkLoss(chunks, waiting=waiting), before)
    assert_as_exact(result, before, (x, weight, labels), exact)
    wide = [n for n in result.program.calls if n.target is torch.ops.aten.as_strided.default and n.meta["val"].ndim > 1]
    sums = [n for n in wide if n.meta["val"].shape == (40, width)]
    assert len(sums) == -(-chunks // waiting), "one of them the gradient"
    assert [n.meta["val"].dtype for n in sums] == [torch.float32] * (len(sums) - 1) + [torch.bfloat16]


@pytest.mark.long
@needs_compiler
def test_one_kernel_of_inductor_s_is_for_all_chunks_but_the_first_and_the_last(monkeypatch):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(2048, 32), nn.Linear(32, 2048)

        def forward(self, ids, labels):
            return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten())

    written, kernels = [], []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(written.append))
    model, ids = Classifier(), torch.randint(0, 2048, (4, 512))
    for chunks in (4, 8):
        written.clear()
        passes = [ChunkLoss(chunks) if item.name == "chunk_loss" else item for item in memopt.TRAINING]
        run = memopt.compile(model, 0.5, backend="inductor", passes=passes)
        run(ids, ids).backward()
        (record,) = [record for record in run.report.passes if record.name == "chunk_loss"]
        assert f"{chunks} chunks" in record.changes[0].summary
        kernels.append(sum(code.count("async_compile.cpp_pybinding(") for code in written))
        torch._dynamo.reset()
    assert kernels[0] == kernels[1]
