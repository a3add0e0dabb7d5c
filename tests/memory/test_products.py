"""Programs that may multiply matrices by cuBLAS, and those that cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.nn import functional as F

import memopt
from memopt.memory.products import may_multiply
from memopt.memory.resident import Resident
from memopt.models import build
from memopt.pass_manager import Change, Pass, PassResult
from memopt.passes.eliminate_dead import EliminateDead
from memopt.step.memory_ledger import MemoryLedger
from tests.support import Apply, capture

GPU = torch.device("cuda", 0)
IMAGE = torch.randn(2, 3, 8, 8)


class Convolutions(nn.Module):
    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.AvgPool2d(2), *more)

    def forward(self, x):
        return self.layers(x).float().log_softmax(1).var()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: F.interpolate(F.max_pool2d(x.relu(), 2), scale_factor=2, mode="bilinear").mean(), False),
        (lambda x: F.cross_entropy(x, torch.zeros(2, 8, 8, dtype=torch.long)), False),
        (lambda x: torch.cat((F.dropout(x), F.pad(x, (1, 0))[..., :8].flip(3).contiguous())), False),
        (lambda x: x @ x, True),
        (lambda x: torch.einsum("nchw,nchv->nwv", x, x), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x), True),
        (lambda x: torch.cdist(x, x), True),
    ],
)  # fmt: skip
def test_what_is_not_known_to_do_without_may_multiply(function, expected):
    assert may_multiply(capture(Apply(function), IMAGE)) == expected


@pytest.mark.long
def test_of_the_models_only_one_without_a_linear_layer_multiplies_nothing(monkeypatch):
    seen: dict[str, bool] = {}
    count = MemoryLedger.count_libraries
    for name in ("unet", "resnet18", "gpt2"):

        def counted(self, programs, name=name):
            programs = list(programs)
            seen[name] = seen.get(name, False) or any(may_multiply(item) for item in programs if item.training)
            return count(self, programs)

        monkeypatch.setattr(MemoryLedger, "count_libraries", counted)
        model = build(name, tiny=True)
        memopt.plan(model, model.example_inputs(2, labels=True))
        torch._dynamo.reset()
    assert seen == {"unet": False, "resnet18": True, "gpt2": True}


def test_a_convolution_that_may_not_be_cudnn_s_may_multiply(monkeypatch):
    assert may_multiply(capture(nn.Conv3d(3, 8, 1), torch.randn(1, 3, 4, 4, 4)))
    program = capture(nn.Conv2d(3, 8, 1), IMAGE)
    assert not may_multiply(program)
    monkeypatch.setattr("memopt.memory.products._MOST", IMAGE.numel() - 1)
    assert may_multiply(program)


@pytest.mark.parametrize("setting", ["conv_1x1_as_mm", "max_autotune", "max_autotune_gemm"])
def test_a_convolution_may_multiply_where_settings_let_it(setting):
    program = capture(nn.Conv2d(3, 8, 1), IMAGE)
    assert not may_multiply(program)
    with config.patch({setting: True}):
        assert may_multiply(program)
    with torch.backends.cudnn.flags(enabled=False):
        assert may_multiply(program)


def test_buffers_of_libraries_are_planned_for_where_something_multiplies():
    alone, beside = Convolutions(), Convolutions(nn.Flatten(), nn.Linear(72, 8), nn.Unflatten(1, (8, 1)))
    found = [memopt.plan(model, IMAGE, device="h100") for model in (alone, beside)]
    assert found[0].breakdown.workspace < 2**20 < 64 * 2**20 < found[1].breakdown.workspace
    with torch.no_grad():
        found = [memopt.plan(model.eval(), IMAGE, device="h100") for model in (alone, beside)]
    assert found[0].peak_bytes < 2**20 < 64 * 2**20 < found[1].peak_bytes


class Broken(Convolutions):
    def forward(self, x):
        x = self.layers[:2](x)
        torch._dynamo.graph_break()
        return self.layers[2:](x).var()


def test_code_between_graphs_may_multiply():
    assert memopt.plan(Broken(), IMAGE, device="h100").breakdown.workspace > 64 * 2**20


def test_they_are_counted_from_the_first_graph_that_multiplies(monkeypatch):
    monkeypatch.setattr("memopt.step.memory_ledger.library_bytes", lambda device: 65)
    quiet, loud = capture(nn.ReLU(), IMAGE), capture(Apply(lambda x: x @ x), IMAGE)
    account = MemoryLedger(None, Resident(libraries=70, device=GPU))
    assert account.count_libraries([quiet]) and account.resident.libraries == 0
    assert not account.count_libraries([quiet])
    assert account.count_libraries([quiet, loud]) and account.resident.libraries == 65
    assert not account.count_libraries([quiet]) and account.resident.libraries == 65


class ByProduct(Pass):
    """A sum of products as one product of vectors."""

    name, tolerance = "by_product", 4.0

    def run(self, program):
        new, changes = program.copy(), []
        for node in new.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.default):
            node.target, node.args = torch.ops.aten.dot.default, node.args[0].args
            changes.append(Change(node.name, "a product"))
        return PassResult(new.finish() if changes else program, changes)


@pytest.mark.parametrize("train", [True, False])
def test_a_rewrite_may_make_a_product_of_something_else(monkeypatch, train):
    monkeypatch.setattr("memopt.step.memory_ledger.library_bytes", lambda device: 65)
    model = Apply(None)
    model.weight = nn.Parameter(torch.ones(8), requires_grad=train)
    model.function = lambda x: (x * model.weight).sum()
    for passes, expected in ((EliminateDead(),), 0), ((ByProduct(), EliminateDead()), 65):
        torch._dynamo.reset()
        with torch.set_grad_enabled(train):
            run = memopt.compile(model, backend="aten", passes=passes, example_inputs=(torch.ones(8),))
            assert run.report.breakdown.workspace == expected
