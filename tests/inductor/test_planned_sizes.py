"""Code for many sizes whose cut a plan has made: sizes without room for torch's own share code, too."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import memopt
from memopt.inductor import symbolic
from memopt.inductor.planned_sizes import SizedPlan, cut_by, in_order
from tests.inductor.test_peak_lower_bound import needs_compiler
from tests.inductor.test_symbolic import Layers, agrees, graphs_of, tokens
from tests.training.steps import peak_of

pytestmark = pytest.mark.usefixtures("own_caches")

SIZES = ((2, 20), (3, 24), (8, 50), (8, 64), (2, 16), (7, 63))


def _budget(share):
    """This share of what eager takes at the largest size."""
    torch.manual_seed(0)
    model, ids = Layers(), tokens(8, 64)
    model(ids).backward()
    model.zero_grad()
    return int(share * peak_of(lambda: model(ids).backward(), model, ids))


def _loop(budget):
    """A run of a script at all sizes; how many graphs were lowered with symbols, and what it says."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Layers()
    twin, lowered, plain = copy.deepcopy(model), [], symbolic.SymbolicTraining._attempt

    def counted(self, *args, **options):
        lowered.append(self._plans)
        return plain(self, *args, **options)

    run = memopt.compile(model, budget, backend="inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symbolic.SymbolicTraining, "_attempt", counted)
        for size in SIZES:
            ids = tokens(*size)
            agrees(run, model, twin, ids)
            model.zero_grad()
            assert peak_of(lambda ids=ids: run(ids).backward(), model, ids) <= budget
            model.zero_grad()
    return run, lowered


@pytest.mark.long
@needs_compiler
def test_a_few_compilations_serve_all_sizes_and_a_second_process_makes_no_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    budget = _budget(0.55)
    run, lowered = _loop(budget)
    assert graphs_of(run) <= 4 and True in lowered and not run.report.notes
    assert run.report.peak_bytes <= run.report.budget_bytes == budget
    again, lowered = _loop(budget)
    assert True not in lowered and graphs_of(again) <= 4


@pytest.mark.long
@needs_compiler
def test_where_no_plan_is_to_be_had_there_is_no_storm_of_plans(monkeypatch):
    budget = _budget(0.55)
    monkeypatch.setattr(symbolic.SymbolicTraining, "_planned_for", lambda *_: None)
    run, lowered = _loop(budget)
    assert lowered.count(True) == 1 and any("planned each by itself" in note for note in run.report.notes)


@pytest.mark.gpu
def test_fused_attention_of_a_gpu_is_planned_for_many_sizes():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 2048, "n_positions": 512}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).cuda().train()
    twin = copy.deepcopy(model)
    run = memopt.compile(model, 0.6, dynamic=True)
    for number, size in enumerate(((8, 512), (5, 300), (8, 100), (3, 511))):
        ids = torch.randint(0, 2048, size, generator=torch.Generator().manual_seed(number)).cuda()
        for call in (run, twin):
            with torch.autocast("cuda", torch.bfloat16):
                call(input_ids=ids, labels=ids).loss.backward()
        for own, eager in zip(model.parameters(), twin.parameters(), strict=True):
            assert (own.grad - eager.grad).norm() <= 0.05 * eager.grad.norm()
        model.zero_grad()
        twin.zero_grad()
    assert run.report.peak_bytes <= run.report.budget_bytes


def test_a_size_that_an_operator_of_forward_returns_is_there_in_backward():
    with torch.library._scoped_library("memopt_test_sizes", "DEF") as library:
        library.define("doubled(Tensor x) -> (Tensor, SymInt)")
        library.impl("doubled", lambda x: (2 * x, x.shape[0]), "CompositeExplicitAutograd")

        def joint(primals, tangents):
            (x,), (tangent,) = primals, tangents
            y, rows = torch.ops.memopt_test_sizes.doubled(x)
            twice = 2 * rows
            return [y.sin(), (tangent * y.cos()).reshape(twice, -1).view_as(x)]

        given = ([torch.randn(4, 6)], [torch.randn(4, 6)])
        traced = make_fx(joint, tracing_mode="symbolic")(*given)
        for node in traced.graph.find_nodes(op="placeholder"):
            node.target = node.target.replace("primals", "primals_").replace("tangents", "tangents_")
        (y,) = (n for n in traced.graph.nodes if n.target is operator.getitem and n.args[1] == 0)
        forward, backward = cut_by(SizedPlan(frozenset({y.name}), (), frozenset(), 0), traced, num_fwd_outputs=1)
        out, *saved = forward(*given[0])
        numbers, tensors = ([each for each in saved if isinstance(each, kind)] for kind in (int, torch.Tensor))
        (gradient,) = backward(*numbers, *tensors, *given[1])
    assert torch.equal(out, (2 * given[0][0]).sin()) and 4 in numbers
    assert torch.equal(gradient, given[1][0] * (2 * given[0][0]).cos())


def test_a_graph_is_in_the_order_of_names_with_what_each_reads_before_it():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.sin, (x,), name="first")
    view = graph.call_function(torch.neg, (first,), name="view")
    second = graph.call_function(torch.cos, (x,), name="second")
    last = graph.call_function(torch.add, (view, second), name="last")
    graph.output((last,))
    module = fx.GraphModule({}, graph)
    found = in_order(module, ["second", "last", "first", "second"])
    assert [node.name for node in found.graph.nodes] == ["x", "second", "first", "view", "last", "output"]
    value = torch.randn(3)
    assert torch.equal(found(value)[0], module(value)[0])


def test_a_plan_that_saves_what_the_graph_has_not_is_none_of_it():
    graph = fx.Graph()
    graph.output((graph.call_function(torch.sin, (graph.placeholder("x"),), name="value"),))
    module = fx.GraphModule({}, graph)
    assert SizedPlan(frozenset({"value", "x"}), (), frozenset(), 0).is_of(module)
    assert not SizedPlan(frozenset({"value", "copy"}), (), frozenset(), 0).is_of(module)
