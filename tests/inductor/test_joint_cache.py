from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config

from memopt.inductor.generated import GeneratedCode
from memopt.inductor.joint_cache import AbsentError, JointCache
from memopt.inductor.partition import Partition, compile_training


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def _step(lower):
    """Loss and gradients of a small model whose graph `lower` makes a function of."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    loss = torch.compile(model, backend=lower)(torch.linspace(-1, 1, 32).reshape(4, 8)).square().sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def _partition(cut, facts):
    partition = Partition(cut)
    partition.token = facts
    return partition


def _never(*_, **__):
    raise AssertionError("nothing is cut or lowered")


def _found(cache, graph_module, inputs, *, facts=b"facts", around=lambda call: call):
    """The function that the cache has; None where it has none."""
    try:
        cached = cache.looking(GeneratedCode(), GeneratedCode(around))
        return compile_training(graph_module, inputs, _never, _partition(_never, facts), cached=cached)
    except AbsentError:
        return None


def _lowered(cache, graphs, *, look=True, facts=b"facts"):
    """A backend that looks for a graph in vain, and lowers it."""

    def inner(module, inputs, **options):
        graphs.append(module)
        return inductor.compile_fx_inner(module, inputs, **options)

    def lower(graph_module, inputs):
        if look:
            assert _found(cache, graph_module, inputs, facts=facts) is None
        partition = _partition(min_cut_rematerialization_partition, facts)
        return compile_training(graph_module, inputs, inner, partition, cached=cache.attempt())

    return lower


def _settled():
    cache = JointCache()
    first = _step(_lowered(cache, []))
    cache.write(cache.latest_entry())
    return first


def test_what_was_written_is_found_and_computes_the_same():
    first = _settled()
    second = _step(lambda graph_module, inputs: _found(JointCache(), graph_module, inputs))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_other_facts_are_another_place():
    _settled()
    _step(_lowered(JointCache(), [], facts=b"others"))


def test_nothing_is_written_before_it_is_told_to(tmp_path):
    cache = JointCache()
    _step(_lowered(cache, []))
    assert cache.key and cache.latest_entry() is not None
    assert not (tmp_path / "aotautograd").exists()


def test_what_was_not_looked_for_has_no_place():
    cache = JointCache()
    _step(_lowered(cache, [], look=False))
    assert not cache.key and cache.latest_entry() is None


def test_backward_alone_runs_within_what_is_put_around_it():
    calls = []

    def around(call):
        def watched(args):
            calls.append(len(args))
            return call(args)

        return watched

    def lower(graph_module, inputs):
        run = _found(JointCache(), graph_module, inputs, around=around)
        with torch.no_grad(), torch._guards.tracing(None):
            run(*inputs)
        assert not calls
        return run

    _settled()
    _step(lower)
    assert len(calls) == 1


def test_the_metadata_of_nodes_stays():
    cache, graphs = JointCache(), []
    _step(_lowered(cache, graphs))
    assert cache.latest_entry() is not None and len(graphs) == 2
    assert all("val" in node.meta for module in graphs for node in module.graph.nodes if node.op == "call_function")


def test_what_cannot_be_serialized_runs(monkeypatch):
    def fails(module):
        raise TypeError("no pickle")

    monkeypatch.setattr(graph_compile, "serialize_graph_module", fails)
    first = _settled()
    second = _step(lambda graph_module, inputs: _found(JointCache(), graph_module, inputs))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_cannot_be_written_is_no_error(monkeypatch):
    def fails(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr(AOTAutogradCache, "save", fails)
    JointCache().write(object())


@pytest.mark.filterwarnings("ignore:dynamo_pgo")
@pytest.mark.parametrize("setting", ["force_disable_caches", "fx_graph_cache"])
def test_who_wants_no_caches_has_none(setting, tmp_path):
    cache = JointCache()
    with inductor_config.patch({setting: setting == "force_disable_caches"}):
        _step(_lowered(cache, []))
    assert cache.latest_entry() is None
    assert not (tmp_path / "aotautograd").exists()


def test_a_bundled_entry_is_not_made():
    cache = JointCache()
    with functorch_config.patch(bundled_autograd_cache=True):
        assert len(_step(_lowered(cache, []))) == 5
    assert cache.latest_entry() is None
