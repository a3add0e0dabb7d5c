"""Costs of operators, against the allocator's events of the real ones; each is run once, on disk for the next time."""

import dataclasses
import itertools
import json

import pytest
import torch

from memopt.backends.aten import emit
from memopt.common.cache_dir import cache_dir
from memopt.memory.cost import table as table_module
from memopt.memory.cost.devices import find
from memopt.memory.cost.key import key_of
from memopt.memory.cost.roofline import is_light, makes_nothing
from memopt.memory.cost.table import CostTable
from memopt.memory.measure import measure
from memopt.memory.timeline import timeline
from memopt.models import build
from tests.memory.cost.build import GEOMETRY, aten, call
from tests.support import allocations, capture


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


@pytest.fixture
def runs(monkeypatch):
    """What was run, one entry per session: the nodes, or the device that was calibrated."""
    found = []
    measure_operators, calibrate = table_module.measure_operators, table_module.calibrate
    monkeypatch.setattr(
        table_module, "measure_operators", lambda nodes, *rest: found.append(nodes) or measure_operators(nodes, *rest)
    )
    monkeypatch.setattr(table_module, "calibrate", lambda device: found.append(device) or calibrate(device))
    return found


def real_workspace(target, *args, **kwargs):
    kept = []
    target(*args, **kwargs)
    sums = [0, *itertools.accumulate(allocations(lambda: kept.append(target(*args, **kwargs))))]
    return max(sums) - sums[-1], sums[-1]


X, W = torch.randn(2, 16, 32, 32), torch.randn(32, 16, 3, 3)
Y = torch.randn(2, 32, 32, 32)
Q = torch.randn(2, 4, 128, 32)
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
    node = call(*case)
    cost = CostTable().cost(node)
    assert (cost.workspace_bytes, cost.output_bytes) == expected
    assert cost.measured and 0 < cost.seconds < 1
    assert cost.timed is not is_light(node)


def test_known_figures():
    cost = CostTable().cost(call(aten.sort.default, torch.randn(100, 100)))
    assert cost.output_bytes == 100 * 100 * (4 + 8) and cost.workspace_bytes > 0
    assert CostTable().measure(call(aten.relu.default, X)) == 0


def test_views_and_unmade_values_cost_nothing():
    for case in [(aten.view.default, X, [-1]), (aten.t.default, Q[0, 0]), (aten.sym_size.int, X, 0)]:
        cost = CostTable().cost(call(*case))
        assert dataclasses.astuple(cost) == (0.0, 0, 0, False, False)


def chain():
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(5)])
    return capture(model, torch.randn(4, 8))


def test_equal_operators_are_run_once_and_in_one_session(own_cache, runs):
    program, table = chain(), CostTable()
    costs = table.measure_all(program)
    assert list(costs) == [node.name for node in program.calls]
    assert all(cost.measured or makes_nothing(node) for node, cost in zip(program.calls, costs.values(), strict=True))
    nodes, device = runs
    assert len(nodes) == 2 and device == torch.device("cpu")  # addmm and relu; the speed of memory for relu
    assert table.measure_all(program) == costs and len(runs) == 2


def test_what_an_earlier_process_measured_is_not_run_again(own_cache, runs):
    program = chain()
    first = CostTable().measure_all(program)
    count = len(runs)
    assert CostTable().measure_all(program) == first
    assert len(runs) == count == 2


def test_what_another_process_measures_meanwhile_is_not_run(own_cache, runs, monkeypatch):
    program = chain()
    first = CostTable().measure_all(program)
    table, asked = CostTable(), set()
    get = table._store.get

    def get_later(scope, key):
        known = key in asked
        asked.add(key)
        return get(scope, key) if known else None

    asked.add("calibration")
    monkeypatch.setattr(table._store, "get", get_later)
    assert table.measure_all(program) == first and len(runs) == 2


def test_without_a_cache_everything_is_run_again(monkeypatch, runs):
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    program = chain()
    CostTable().measure_all(program)
    CostTable().measure_all(program)
    assert len(runs) == 4


def records(folder):
    return sorted((folder / "costs").rglob("*.json"))


@pytest.mark.parametrize("damage", ["", "{", "null", "[]", '{"seconds": 1.0}', "\0"])
def test_damaged_entries_are_measured_again(own_cache, runs, damage):
    program = chain()
    first = CostTable().measure_all(program)
    assert len(records(cache_dir())) == 3
    for path in records(cache_dir()):
        path.write_text(damage)
    del runs[:]
    second = CostTable().measure_all(program)
    assert len(runs) == 2
    assert [(c.workspace_bytes, c.output_bytes) for c in first.values()] == [
        (c.workspace_bytes, c.output_bytes) for c in second.values()
    ]
    assert CostTable().measure_all(program) == second


BAD = [
    {"seconds": -1.0},
    {"seconds": float("inf")},
    {"seconds": None},
    {"seconds": "1"},
    {"seconds": 1},
    {"workspace_bytes": -1},
    {"workspace_bytes": 1.0},
    {"workspace_bytes": True},
    {"output_bytes": None},
    {"more": 1},
]


@pytest.mark.parametrize("change", BAD, ids=map(str, BAD))
def test_figures_that_no_run_leaves_are_not_believed(change):
    node = call(aten.mm.default, Q[0, 0], Q[0, 0].t())
    good = {"seconds": 1e-3, "workspace_bytes": 0, "output_bytes": 64}
    assert table_module._measured(good, node) is not None
    assert table_module._measured(good | change, node) is None


def test_the_time_of_light_operators_is_never_read():
    node = call(aten.relu.default, X)
    good = {"seconds": None, "workspace_bytes": 0, "output_bytes": 64}
    assert table_module._measured(good, node) is not None
    assert table_module._measured(good | {"seconds": 1.0}, node) is None


@pytest.mark.parametrize(
    "change",
    [
        {"flops": {"float32": 1e9}},
        {"flops": None},
        {"traffic": []},
        {"traffic": [[12, 1e-6], [6, 1e-5]]},
        {"traffic": [[12, 0.0]]},
        {"traffic": [[12, 1e-6, 3]]},
        {"traffic": [12]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_speed_that_no_calibration_leaves_is_not_believed(change):
    cpu = torch.device("cpu")
    rates = dict.fromkeys(("float16", "bfloat16", "tf32", "float32", "float64"), 1e9)
    good = {"flops": rates, "traffic": [[12, 1e-6], [120, 1e-5]]}
    found = table_module._device_from(good, cpu)
    assert found is not None and found.flops == rates and found.traffic == ((12, 1e-6), (120, 1e-5))
    assert table_module._device_from(good | change, cpu) is None


def test_settings_that_choose_other_kernels_are_kept_apart(own_cache, runs):
    node, table = call(aten.mm.default, Q[0, 0], Q[0, 0].t()), CostTable()
    table.cost(node)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        table.cost(node)
        assert len(runs) == 2
    finally:
        torch.set_num_threads(threads)
    table.cost(node)
    CostTable().cost(node)
    assert len(runs) == 2


def test_random_operators_leave_the_random_state(own_cache):
    state = torch.get_rng_state()
    cost = CostTable().cost(call(aten.native_dropout.default, X, 0.5, True))
    assert cost.measured and cost.output_bytes == X.nbytes + X.numel()
    assert CostTable().cost(call(aten.bernoulli.default, X)).timed
    assert torch.equal(torch.get_rng_state(), state)


def test_large_operators_are_estimated(own_cache, runs):
    node = call(aten.convolution.default, X, W, None, *GEOMETRY)
    small = CostTable(limit_bytes=1000).cost(node)
    assert not small.measured and not small.timed and runs == [] and not (cache_dir() / "costs").exists()
    large = CostTable().cost(node)
    assert large.measured
    assert small.output_bytes == large.output_bytes
    assert 0.5 * large.workspace_bytes <= small.workspace_bytes <= 2 * large.workspace_bytes


@pytest.mark.parametrize(
    ("limit", "ceiling", "allowed"),
    [(None, None, 5_000), (None, 9_000, 5_000), (None, 4_000, 3_000), (700, 4_000, 700), (None, 500, -500)],
)
def test_the_limit_on_cuda(monkeypatch, limit, ceiling, allowed):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 20_000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1_000)
    monkeypatch.setattr(table_module, "clock_bytes", lambda device: 100)
    table = CostTable(limit, ceiling_bytes=ceiling)
    assert table._limit(torch.device("cuda", 0)) == allowed - 100
    assert CostTable(7, ceiling_bytes=1)._limit(torch.device("cpu")) == 7 - 100


def test_where_no_ceiling_is_known_what_is_run_keeps_within_the_room_that_there_is_now(own_cache, runs):
    node, rooms = call(aten.mm.default, *torch.randn(2, 64, 64).unbind()), [1000, 1_000_000]
    assert not CostTable(available=lambda: rooms[0]).cost(node).measured and runs == []  # nor is the device
    assert CostTable(available=lambda: rooms[1]).cost(node).measured and len(runs) == 1


def test_nothing_is_run_beyond_the_room_that_is_left_of_a_budget_in_bytes(own_cache, runs):
    """A first step on a CPU took 2.3 times its budget while logits' operators were timed, and the CPU itself.

    And 1.09 of it while those were run whose workspace only a run tells.
    """
    table = CostTable(ceiling_bytes=20_000, available=lambda: 4000)
    product, half = (call(aten.mm.default, *torch.randn(2, 64, 64).to(kind).unbind()) for kind in (X.dtype, torch.half))
    convolved = call(aten.convolution.default, X, W, None, *GEOMETRY)
    assert not any(table.cost(node).measured for node in (product, half, convolved))
    assert runs == []  # nor is the device calibrated: that takes 134 MB
    assert CostTable(ceiling_bytes=2**30, available=lambda: 2**29).cost(product).measured
    assert CostTable(ceiling_bytes=2**30, available=lambda: 2**29).cost(convolved).measured
    assert CostTable(ceiling_bytes=20_000, available=lambda: 4000).cost(convolved).measured  # as it is on disk by now


def test_the_device_is_not_measured_before_a_fraction_is_known_in_bytes(own_cache, runs):
    """A first step took 134 MB, of a budget of 2.6, where no graph could be captured and no costs were on disk."""
    rooms = [None]
    table, node = CostTable(available=lambda: rooms[0]), call(aten.add.Tensor, X, X)
    assert table.cost(node).measured and all(isinstance(run, list) for run in runs)
    rooms[0] = 2**30
    table.device(node)
    assert torch.device("cpu") in runs
    runs.clear()
    CostTable(available=lambda: None, estimates=True).device(node)  # without a budget
    assert runs == []  # it is known by now


def test_operators_that_are_run_together_keep_within_the_room(own_cache, monkeypatch):
    given = []
    measure = table_module.measure_operators
    monkeypatch.setattr(
        table_module,
        "measure_operators",
        lambda nodes, device, limit: given.append(limit) or measure(nodes, device, limit),
    )
    small = call(aten.mm.default, *torch.randn(2, 8, 8).unbind())
    assert CostTable(ceiling_bytes=20_000, available=lambda: 4000).cost(small).measured and given == [4000]


def test_devices_that_are_not_here_are_estimated(runs):
    cost = CostTable().cost(call(aten.mm.default, *torch.empty(2, 4096, 4096, device="meta").unbind()))
    assert not cost.measured and cost.output_bytes == 4 * 4096**2
    assert cost.seconds > CostTable().cost(call(aten.relu.default, torch.empty(100, device="meta"))).seconds
    assert runs == []


def test_for_a_target_nothing_is_run_and_nothing_kept(own_cache, runs):
    node = call(aten.mm.default, *torch.empty(2, 4096, 4096, dtype=torch.bfloat16, device="meta").unbind())
    costs = [CostTable(target=find(name)).cost(node) for name in ("h100", "a100", "t4")]
    assert costs[0].seconds < costs[1].seconds < costs[2].seconds
    assert 2 * 4096**3 / 989.4e12 < costs[0].seconds < 2 * 2 * 4096**3 / 989.4e12
    CostTable(target=find("h100")).measure_all(chain())
    assert runs == [] and list(cache_dir().iterdir()) == []


def test_operators_that_fail_on_made_up_values_are_estimated(own_cache):
    singular = call(aten.linalg_cholesky.default, torch.eye(8))
    good = call(aten.relu.default, X)
    graph_costs = CostTable()._look_up([singular, good])
    assert [cost.measured for cost in graph_costs.values()] == [False, True]
    keys = [json.loads(path.read_text())["key"] for path in records(cache_dir())]
    assert sorted(keys) == [key_of(good), "calibration"]


def test_collectives_are_never_run():
    node = call(aten.relu.default, X)
    node.target = torch.ops._c10d_functional.all_reduce.default
    assert not CostTable().cost(node).measured


@pytest.mark.parametrize("name", ["resnet18:tiny", "mobilenet_v3_small:tiny", "gpt2:tiny", "unet:tiny"])
def test_the_predicted_peak_is_the_real_one(name):
    model = build(name).eval()
    inputs = model.example_inputs(2)
    program = capture(model, **inputs)
    costs = CostTable().measure_all(program)
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
        cost = CostTable().cost(call(*case))
        assert torch.equal(torch.cuda.get_rng_state(), state)
        case[0](*case[1:])
        measured = measure(case[0], *case[1:], device="cuda")
        assert cost.measured and 0 < cost.seconds < 0.1
        assert cost.output_bytes == measured.end_bytes
        assert cost.workspace_bytes == measured.peak_bytes - measured.end_bytes
