from __future__ import annotations

import logging

import pytest
import torch
from torch import fx, nn
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import codecache
from torch._inductor import compile_fx as inductor
from torch._logging._internal import trace_log

import memopt
from memopt.inductor.partition import Partition, compile_training


@pytest.fixture
def words(monkeypatch):
    """Names of what was put into words while a small model was lowered."""
    found = []
    for owner, name in ((fx.GraphModule, "print_readable"), (codecache.FxGraphCachePickler, "debug_lines")):
        plain = getattr(owner, name)

        def watched(self, *args, _plain=plain, _name=name, **options):
            found.append(_name)
            return _plain(self, *args, **options)

        monkeypatch.setattr(owner, name, watched)
    return found


def _lower():
    def backend(graph_module, inputs):
        partition = Partition(min_cut_rematerialization_partition)
        return compile_training(graph_module, inputs, inductor.compile_fx_inner, partition)

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    torch.compile(model, backend=backend)(torch.linspace(-1, 1, 32).reshape(4, 8)).square().sum().backward()


def test_nothing_is_put_into_words_that_nobody_reads(words, monkeypatch):
    monkeypatch.setattr(trace_log, "handlers", [])
    _lower()
    assert "debug_lines" not in words
    assert words.count("print_readable") <= 2  # the code of each graph goes by it


@pytest.mark.parametrize("read", [False, True])
def test_engines_of_a_function_a_graph_print_none_for_nobody(read, words, monkeypatch):
    monkeypatch.setattr(trace_log, "handlers", [logging.NullHandler()] if read else [])
    torch._dynamo.reset()
    run = memopt.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend="aten", verify=False)
    run(torch.ones(4, 8)).sum().backward()
    assert ("print_readable" in words) is read


@pytest.mark.parametrize("reader", ["structured", "joint graphs", "graphs", "keys"])
def test_who_reads_a_log_finds_all_of_it(reader, words, monkeypatch):
    monkeypatch.setattr(trace_log, "handlers", [logging.NullHandler()] if reader == "structured" else [])
    log = {
        "joint graphs": graph_compile.aot_joint_log, "graphs": graph_compile.aot_graphs_log, "keys": codecache.log,
    }.get(reader)  # fmt: skip
    if log is not None:
        monkeypatch.setattr(log, "isEnabledFor", lambda level: True)
    _lower()
    if reader == "keys":
        assert "debug_lines" in words
    else:
        assert words.count("print_readable") >= 3
