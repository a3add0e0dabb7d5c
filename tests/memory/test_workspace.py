"""Workspaces and times of operators, against the allocator's events of the real ones."""

import itertools

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from memopt.backends.aten import emit
from memopt.memory import workspace
from memopt.memory.measure import allocations, measure
from memopt.memory.timeline import timeline
from memopt.memory.workspace import WorkspaceTable, estimate, key_of
from memopt.models import build
from memopt.program import is_view
from tests.support import capture

aten = torch.ops.aten


def call(target, *args, **kwargs):
    """A graph of one call; tensors among the arguments become placeholders."""
    graph, mode, nodes = fx.Graph(), FakeTensorMode(), {}

    def place(value):
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in nodes:
            nodes[id(value)] = graph.placeholder(f"x{len(nodes)}")
            nodes[id(value)].meta["val"] = mode.from_tensor(value)
        return nodes[id(value)]

    args, kwargs = pytree.tree_map(place, (args, kwargs))
    node = graph.call_function(target, args, kwargs)
    with mode, torch.no_grad():
        found, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*found, **named)
    return node


def real_workspace(target, *args, **kwargs):
    kept = []
    target(*args, **kwargs)
    sums = [0, *itertools.accumulate(allocations(lambda: kept.append(target(*args, **kwargs))))]
    return max(sums) - sums[-1], sums[-1]


X, W = torch.randn(2, 16, 32, 32), torch.randn(32, 16, 3, 3)
Y = torch.randn(2, 32, 32, 32)
Q = torch.randn(2, 4, 128, 32)
GEOMETRY = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
CASES = {
    "add": (aten.add.Tensor, X, X),
    "mm": (aten.mm.default, Q[0, 0], Q[0, 0].t()),
    "addmm": (aten.addmm.default, Q[0, 0, 0].clone(), Q[0, 0], Q[0, 0, :32]),
    "convolution": (aten.convolution.default, X, W, None, *GEOMETRY),
    "convolution channels last": (
        aten.convolution.default,
        X.to(memory_format=torch.channels_last),
        W,
        None,
        *GEOMETRY,
    ),
    "convolution backward": (aten.convolution_backward.default, Y, X, W, [32], *GEOMETRY, [True, True, True]),
    "sort": (aten.sort.default, Q),
    "attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, Q, Q, Q, 0.0, True),
    "embedding backward": (aten.embedding_dense_backward.default, Q, torch.zeros(2, 4, 128).long(), 99, -1, False),
    "batch norm": (aten.native_batch_norm.default, X, *torch.rand(4, 16).unbind(), True, 0.1, 1e-5),
    "half precision": (aten.mm.default, Q[0, 0].bfloat16(), Q[0, 0].t().bfloat16()),
    "expanded": (aten.mul.Tensor, torch.randn(16, 1).expand(16, 16), torch.randn(16, 16)),
    "factory": (aten.full.default, [100, 100], 1.0),
    "list": (aten.cat.default, [X, X, Y], 1),
    "scalar": (aten.mul.Tensor, X, torch.tensor(2.0)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equal_to_the_real_operator(case):
    with torch.no_grad():
        expected = real_workspace(*case)
    cost = WorkspaceTable().cost(call(*case))
    assert (cost.workspace_bytes, cost.output_bytes) == expected
    assert cost.measured and 0 < cost.seconds < 1


def test_known_figures():
    cost = WorkspaceTable().cost(call(aten.sort.default, torch.randn(100, 100)))
    assert cost.output_bytes == 100 * 100 * (4 + 8) and cost.workspace_bytes > 0
    assert WorkspaceTable().measure(call(aten.relu.default, X)) == 0


def test_views_and_unmade_values_cost_nothing():
    for case in [(aten.view.default, X, [-1]), (aten.t.default, Q[0, 0]), (aten.sym_size.int, X, 0)]:
        cost = WorkspaceTable().cost(call(*case))
        assert (cost.seconds, cost.workspace_bytes, cost.output_bytes, cost.measured) == (0.0, 0, 0, False)


def test_equal_operators_are_run_once_and_in_one_session(monkeypatch):
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(5)])
    program = capture(model, torch.randn(4, 8))
    sessions = []
    run = workspace._run
    monkeypatch.setattr(workspace, "_run", lambda nodes, device: sessions.append(nodes) or run(nodes, device))
    table = WorkspaceTable()
    costs = table.measure_all(program)
    assert list(costs) == [node.name for node in program.calls]
    assert all(cost.measured or is_view(node) for node, cost in zip(program.calls, costs.values(), strict=True))
    assert len(sessions) == 1 and len(sessions[0]) == 2  # addmm and relu
    assert table.measure_all(program) == costs and len(sessions) == 1


def test_what_tells_operators_apart():
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    keys = [
        key_of(call(*case))
        for case in [
            (aten.mul.Tensor, x, y),
            (aten.mul.Tensor, x, x),
            (aten.mul.Tensor, x, y.t()),
            (aten.mul.Tensor, x, 2),
            (aten.mul.Tensor, x, 2.0),
            (aten.mul.Tensor, x, True),
            (aten.mul.Tensor, x.double(), y.double()),
            (aten.mul.Tensor, x, y[:1]),
            (aten.add.Tensor, x, y),
        ]
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(call(aten.mul.Tensor, y, x)) == keys[0]


def test_random_operators_leave_the_random_state():
    state = torch.get_rng_state()
    cost = WorkspaceTable().cost(call(aten.native_dropout.default, X, 0.5, True))
    assert cost.measured and cost.output_bytes == X.nbytes + X.numel()
    assert torch.equal(torch.get_rng_state(), state)


def test_large_operators_are_estimated():
    node = call(aten.convolution.default, X, W, None, *GEOMETRY)
    small, large = WorkspaceTable(limit_bytes=1000).cost(node), WorkspaceTable().cost(node)
    assert not small.measured and large.measured
    assert small == estimate(node)
    assert small.output_bytes == large.output_bytes
    assert 0.5 * large.workspace_bytes <= small.workspace_bytes <= 2 * large.workspace_bytes


def test_devices_that_are_not_here_are_estimated():
    cost = WorkspaceTable().cost(call(aten.mm.default, *torch.empty(2, 4096, 4096, device="meta").unbind()))
    assert not cost.measured and cost.output_bytes == 4 * 4096**2
    assert cost.seconds > WorkspaceTable().cost(call(aten.relu.default, torch.empty(100, device="meta"))).seconds


def test_operators_that_fail_on_made_up_values_are_estimated():
    singular = call(aten.cholesky.default, torch.eye(8))
    good = call(aten.relu.default, X)
    graph_costs = WorkspaceTable()._look_up([singular, good])
    assert [cost.measured for cost in graph_costs.values()] == [False, True]


def test_collectives_are_never_run():
    node = call(aten.relu.default, X)
    node.target = torch.ops._c10d_functional.all_reduce.default
    assert not WorkspaceTable().cost(node).measured


@pytest.mark.parametrize("name", ["resnet18:tiny", "mobilenet_v3_small:tiny", "gpt2:tiny", "unet:tiny"])
def test_the_predicted_peak_is_the_real_one(name):
    model = build(name).eval()
    inputs = model.example_inputs(2)
    program = capture(model, **inputs)
    costs = WorkspaceTable().measure_all(program)
    line = timeline(program, {key: cost.workspace_bytes for key, cost in costs.items()})
    run = emit(program.graph_module)

    def values():
        users = iter(inputs.values())
        return [program.state[e.name] if e.name in program.state else next(users) for e in program.inputs]

    with torch.no_grad():
        run(values())
        assert measure(lambda: run(values())).peak_bytes == line.peak_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda():
    q = torch.randn(2, 4, 1024, 64, device="cuda", dtype=torch.bfloat16)
    x, w = torch.randn(8, 64, 56, 56, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    for case in [
        (aten.relu.default, q),
        (aten.sort.default, q),
        (aten.mm.default, q[0, 0], q[0, 0].t()),
        (aten._scaled_dot_product_flash_attention.default, q, q, q, 0.1, True),
        (aten.convolution.default, x, w, None, *GEOMETRY),
        (aten.native_dropout.default, q, 0.5, True),
        (aten.add.Tensor, q, torch.tensor(1.0)),
    ]:
        state = torch.cuda.get_rng_state()
        cost = WorkspaceTable().cost(call(*case))
        assert torch.equal(torch.cuda.get_rng_state(), state)
        case[0](*case[1:])
        measured = measure(case[0], *case[1:], device="cuda")
        assert cost.measured and 0 < cost.seconds < 0.1
        assert cost.output_bytes == measured.end_bytes
        assert cost.workspace_bytes == measured.peak_bytes - measured.end_bytes
