"""One trace for several lowerings: what is kept, what is not, and that the code is the same."""

import gc

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.partitioners import default_partition
from torch._inductor import compile_fx as inductor

import memopt
from memopt.inductor.partition import Partition, compile_training
from memopt.inductor.trace import Trace
from tests.inductor.test_peak_lower_bound import needs_compiler

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def calls(monkeypatch):
    """How often torch traced a joint graph, and rewrote one."""
    counts = {"aot_dispatch_autograd_graph": 0, "_recursive_joint_graph_passes": 0}

    def counting(module, name):
        plain = getattr(module, name)

        def counted(*args, **options):
            counts[name] += 1
            return plain(*args, **options)

        monkeypatch.setattr(module, name, counted)

    counting(graph_compile, "aot_dispatch_autograd_graph")
    counting(inductor, "_recursive_joint_graph_passes")
    return counts


def lowered(function, inputs, times, trace):
    """Lower the function's graph several times; return its results and gradients, and what the partitioner was given.

    Both graphs run as graphs of their own: no compiler is needed.
    """
    joints, found = [], []

    def cut(joint, joint_inputs, **options):
        joints.append(joint)
        return default_partition(joint, joint_inputs, **options)

    def inner(module, example_inputs, **options):
        def run(args):
            values = list(args)
            args.clear()
            return module(*values)

        run._boxed_call = True
        return run

    def backend(graph_module, example_inputs):
        runs = [compile_training(graph_module, example_inputs, inner, Partition(cut), trace) for _ in range(times)]

        def every(*args):
            with torch.enable_grad():
                found.extend(run(*args) for run in runs[:-1])
            return runs[-1](*args)

        return every

    result = torch.compile(function, backend=backend)(*inputs)
    results = [first[0] for first in found] + [result]
    gradients = [torch.autograd.grad(value, [x for x in inputs if x.requires_grad]) for value in results]
    return [value.detach() for value in results], gradients, joints


def test_a_graph_is_traced_once_and_every_lowering_gives_the_same(calls):
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    function = lambda x, y: (x.sin() @ y).square().sum()  # noqa: E731
    results, gradients, joints = lowered(function, (x, y), 3, Trace())
    assert calls["aot_dispatch_autograd_graph"] == 1
    # The graphs of the other lowerings are not joint graphs: each is rewritten where it is lowered, if at all.
    assert calls["_recursive_joint_graph_passes"] == 1
    assert len(joints) == 3 and all(joint is joints[0] for joint in joints)
    expected = function(x, y)
    for result, given in zip(results, gradients, strict=True):
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(given, torch.autograd.grad(expected, (x, y), retain_graph=True))


def test_a_buffer_that_is_written_to_is_written_once_in_every_lowering(calls):
    x, count = torch.randn(4, requires_grad=True), torch.zeros(4)

    def function(x, count):
        count.add_(1)
        return (x * count).sum()

    results, gradients, _ = lowered(function, (x, count), 3, Trace())
    assert calls["aot_dispatch_autograd_graph"] == 1 and count.tolist() == [3.0] * 4
    for number, (result, (gradient,)) in enumerate(zip(results, gradients, strict=True), start=1):
        torch.testing.assert_close(result, (x.detach() * number).sum())
        assert gradient.tolist() == [float(number)] * 4


def test_another_graph_is_traced_anew(calls):
    x, trace = torch.randn(4, requires_grad=True), Trace()
    lowered(lambda x: x.sin().sum(), (x,), 1, trace)
    torch._dynamo.reset()
    (result,), _, _ = lowered(lambda x: x.cos().sum(), (x,), 1, trace)
    assert calls["aot_dispatch_autograd_graph"] == 2
    torch.testing.assert_close(result, x.detach().cos().sum())


def test_without_a_trace_to_keep_each_lowering_traces(calls):
    x = torch.randn(4, requires_grad=True)
    lowered(lambda x: x.sin().sum(), (x,), 2, None)
    assert calls["aot_dispatch_autograd_graph"] == 2


def test_a_graph_with_subgraphs_is_traced_anew(calls):
    x, flag = torch.randn(4, requires_grad=True), torch.tensor(True)

    def function(x, flag):
        return torch.cond(flag, lambda x: x.sin(), lambda x: x.cos(), (x,)).sum()

    (first, second), _, joints = lowered(function, (x, flag), 2, Trace())
    assert calls["aot_dispatch_autograd_graph"] == 2 and joints[0] is not joints[1]
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, x.detach().sin().sum())


def test_what_tracing_says_of_the_graph_is_said_again_and_a_list_that_grew_is_no_such_thing(monkeypatch):
    class Metadata:
        def __init__(self):
            self.tokens, self.same = None, 1
            self.grown = []

    class Mode:
        pass

    module = torch.fx.symbolic_trace(torch.nn.Identity())
    mode, traced = Mode(), []

    def plain(flat_fn, *args, fw_metadata):
        traced.append(fw_metadata)
        fw_metadata.tokens = "found"
        if flat_fn == "grows":
            fw_metadata.grown.append(1)
        return module, [], [], None

    monkeypatch.setattr("memopt.inductor.trace.fake_mode_here", lambda: mode)
    trace = Trace()
    call = trace._trace(plain)
    call("plain", fw_metadata=Metadata())
    again = Metadata()
    assert call("plain", fw_metadata=again)[0] is module
    assert len(traced) == 1 and again.tokens == "found" and again.same == 1
    trace = Trace()
    call = trace._trace(plain)
    call("grows", fw_metadata=Metadata())
    call("grows", fw_metadata=Metadata())
    assert len(traced) == 3


@needs_compiler
def test_what_was_traced_is_let_go_of_once_the_step_is_lowered():
    """Compiled code holds what made it; the graphs behind that are as large as the model's trace."""
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
    run = memopt.compile(model, "100%", backend="inductor")
    run(torch.randn(64, 16)).sum().backward()
    gc.collect()
    traces = [item for item in gc.get_objects() if type(item) is Trace]
    assert not any(item._kept or item._rewritten for item in traces)
    run(torch.randn(32, 16)).sum().backward()  # another size is lowered anew
