"""Training steps planned by what Inductor's kernels store."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.decomposition import select_decomp_table

from memopt.inductor.fusion import InductorFusion, realize
from memopt.memory.aliasing import analyse
from memopt.memory.cost.table import CostTable
from memopt.memory.timeline import timeline
from memopt.passes.checkpoint import Checkpoint
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.inplace import Inplace
from memopt.passes.sum_lookups import SumLookups
from memopt.program import Phase
from memopt.solve.recompute import plan
from memopt.step.encode_step import lower
from tests.inductor.test_fusion import fused, marked
from tests.inductor.test_peak_lower_bound import graph_of
from tests.passes.build import arguments, capture_joint
from tests.support import assert_same


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.expand, self.contract = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.contract(F.gelu(self.expand(self.norm(x)), approximate="tanh"))


def training_program(layers=4):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    names = [name for name, _ in model.named_parameters()]

    def loss(x, *weights):
        return torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x,)).square().mean()

    tensors = torch.randn(1024, 32), *(value.detach().requires_grad_() for value in model.parameters())
    return capture_joint(loss, *tensors, decompositions=select_decomp_table()), tensors


def test_a_step_takes_less_than_its_operations_would():
    program, _ = training_program()
    new = marked(program)
    assert len(lower(new, {}).operations) < 0.7 * len(lower(program, {}).operations)
    assert timeline(new).peak_bytes < 0.9 * timeline(program).peak_bytes
    assert Inplace().run(new).program is new, "the engine that fuses reuses memory by itself"


@pytest.mark.quick("0.5")
@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_a_plan_of_what_is_stored_gives_the_same_gradients(share):
    program, tensors = training_program()
    new = marked(program)
    problem = lower(new, InductorFusion(CostTable()).costs(new, CostTable().measure_all(new))).problem
    most = timeline(new).peak_bytes
    found = plan(problem, int(share * most), seconds=1)
    assert found.feasible
    result = Checkpoint(schedule=found.schedule).run(new).program
    result.check()
    values = arguments(program, *tensors)
    assert_same(result.run(*values), program.run(*values))
    crossing = {
        argument.name
        for node in result.calls
        if node.meta["phase"] is Phase.BACKWARD
        for argument in node.all_input_nodes
        if argument.op == "call_function" and argument.meta["phase"] is Phase.FORWARD
    }
    assert not crossing & fused(result), "what is not stored is recomputed where backward needs it"
    assert timeline(result).peak_bytes <= share * most


@pytest.mark.parametrize("tied", [False, True])
def test_rows_are_added_to_a_tied_table_s_gradient_in_its_place(tied):
    """Where it is a product, that is; what is computed element by element is computed where the rows are put."""
    torch.manual_seed(0)
    table, ids = torch.randn(300, 8, dtype=torch.bfloat16).requires_grad_(), torch.randint(0, 9, (12,))

    def loss(table, ids):
        x = F.embedding(ids, table).sin()
        return (x @ table.t() if tied else x).float().square().sum() + (0 if tied else (table * 2).float().sum())

    program = capture_joint(loss, table, ids, decompositions=select_decomp_table())
    planned = marked(SumLookups().run(EliminateCopies().run(program).program).program)
    (put,) = [n for n in planned.calls if n.target is torch.ops.aten.index_put.default and len(n.meta["val"]) == 300]
    assert put.meta.get("inplace") == (0 if tied else None)
    aliasing = analyse(planned)
    assert bool(aliasing.created_by(put)) is not tied


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_what_is_joined_channels_last_is_stored_beside_it_where_something_else_reads_it(memory_format):
    aten = torch.ops.aten

    def build(call, x):
        kept, alone = call(aten.relu.default, x), call(aten.sin.default, x)
        joined = call(aten.cat.default, [kept, alone, x], 1)
        return call(aten.neg.default, joined), call(aten.neg.default, kept)

    module = graph_of({"x": torch.randn(2, 4, 8, 8).to(memory_format=memory_format)}, build)
    realize(module)
    asked = [node.target for node in module.graph.nodes if node.meta.get("inductor_realize_to_strides")]
    assert asked == ([aten.relu.default] if memory_format is torch.channels_last else [])
