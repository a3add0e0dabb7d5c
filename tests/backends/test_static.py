"""The static backend: every reference model equal to eager with no allocation but its results, and wrong use."""

import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.static import StaticBackend, plan_for
from memopt.memory.buffers import Home
from memopt.memory.measure import measure
from memopt.pass_manager import PassManager
from tests.end_to_end import FAMILIES, OTHERS, build, cases, in_dtype
from tests.passes.build import trace
from tests.support import allocations, capture
from tests.test_inference import floats, warm_up_statistics


def bound(program):
    return StaticBackend().bind(PassManager(memopt.INFERENCE, verify=False).run(program)[0])


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.quick("resnet18", "gpt2", "vit_b_16")
@pytest.mark.parametrize(
    "name",
    cases(
        (
            "resnet18",
            "mobilenet_v3_large",
            "densenet121",
            "unet",
            "vit_b_16",
            "bert_base",
            "gpt2",
            "llama_tiny",
            "hf_t5",
        )
    ),
)
def test_models_equal_eager_and_allocate_their_results_only(name):
    model, inputs = build(name, labels=False)
    warm_up_statistics(model)
    model.eval()
    compiled = memopt.compile(model, backend="static", verify=False)
    with torch.no_grad():
        expected, found = floats(model(**inputs)), floats(compiled(**inputs))
        taken = measure(lambda: floats(compiled(**inputs)), device="cpu")
        exact = floats(model.double()(**in_dtype(inputs, torch.float64)))
    for eager, value, reference in zip(expected, found, exact, strict=True):
        scale = float(reference.abs().max())
        allowed = 4 * float((eager - reference).abs().max()) + 16 * torch.finfo(torch.float32).eps * scale
        assert (value.dtype, value.shape, value.stride()) == (eager.dtype, eager.shape, eager.stride())
        assert float((value - reference).abs().max()) <= allowed
    if name in FAMILIES or name in OTHERS:
        assert taken.peak_bytes == taken.end_bytes == bytes_of(found)
    assert compiled.report.backend == "static"


@pytest.mark.quick("resnet18", "unet")
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_large", "unet"])
def test_channels_last_models_allocate_their_results_only(name):
    model, inputs = build(name, labels=False)
    model.eval().to(memory_format=torch.channels_last)
    inputs = {key: value.contiguous(memory_format=torch.channels_last) for key, value in inputs.items()}
    compiled = memopt.compile(model, backend="static", verify=False)
    with torch.no_grad():
        (expected,), (found,) = floats(model(**inputs)), floats(compiled(**inputs))
        taken = measure(lambda: compiled(**inputs), device="cpu")
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert taken.peak_bytes == taken.end_bytes == bytes_of([found])


def run_args(program, inputs):
    users = iter(inputs)
    kinds = [entry for entry in program.inputs if entry.kind.value != "constant"]
    return [program.state[entry.name] if entry.name in program.state else next(users) for entry in kinds]


@pytest.mark.quick("2")
@pytest.mark.parametrize("batch", [1, 2])
def test_densenet_copies_no_concatenation(batch):
    model = memopt.models.build("densenet121", layers=(6, 12)).eval()
    program, _ = PassManager(memopt.INFERENCE, verify=False).run(capture(model, **model.example_inputs(batch)))
    plan, _ = plan_for(program)
    cats = [node for node in program.calls if node.target is torch.ops.aten.cat.default]
    assert len(cats) == 18 and all(all(plan.joins[node.name]) for node in cats)
    assert {block.home for block in plan.blocks} == {Home.ARENA, Home.OUTPUT}


def test_a_joined_concatenation_leaves_no_code():
    x = torch.randn(4, 3, 5)
    for last in (torch.cos, torch.clone):  # inside the arena, and as a result
        program = trace(lambda x: (last(torch.cat((x.exp(), x.sin()), 1)),), x)  # noqa: B023
        function = StaticBackend().bind(program)
        assert function.plan.joins == {"cat": (True, True)}
        assert "cat" not in function.code.source and "slice" not in function.code.source
        assert torch.equal(function([x])[0], program.run(x)[0])
    returned = StaticBackend().bind(trace(lambda x: (torch.cat((x.exp(), x.sin()), 1),), x))
    assert "cat" not in returned.code.source and returned.plan.arena_bytes == 0
    assert torch.equal(returned([x])[0], torch.cat((x.exp(), x.sin()), 1))


def test_the_arena_is_the_only_memory_that_stays():
    model, inputs = build("resnet18", labels=False)
    program = capture(model.eval(), **inputs)
    function = bound(program)
    args = run_args(program, inputs.values())
    first = measure(lambda: function(list(args)), device="cpu")
    assert first.peak_bytes == first.end_bytes == function.plan.arena_bytes + function.plan.output_bytes
    assert allocations(lambda: function(list(args))) == [function.plan.output_bytes]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(self.first(x).relu()).softmax(-1)


@pytest.mark.long
def test_the_report_counts_the_arena():
    model, inputs = build("resnet18", labels=False)
    program = capture(model.eval(), **inputs)
    function = bound(program)
    with torch.no_grad():
        report = memopt.compile(model, backend="static", example_inputs=inputs).report
        assert report.peak_bytes == report.breakdown.total
        taken = function.plan.arena_bytes + function.plan.output_bytes
        assert report.breakdown.activations == taken
        torch._dynamo.reset()
        compiled = memopt.compile(model, report.peak_bytes, backend="static")
        compiled(**inputs)
        torch._dynamo.reset()
        compiled = memopt.compile(model, report.peak_bytes - 1, backend="static")  # in another way
        compiled(**inputs)
        assert compiled.report.peak_bytes < report.peak_bytes
        torch._dynamo.reset()
        with pytest.raises(memopt.BudgetError):
            memopt.compile(model, "1kB", backend="static")(**inputs)


def test_results_may_be_held():
    model = Small().eval()
    compiled = memopt.compile(model, backend="static")
    with torch.no_grad():
        batches = [torch.randn(5, 6) for _ in range(4)]
        held = [compiled(x) for x in batches]
        for x, result in zip(batches, held, strict=True):
            torch.testing.assert_close(result, model(x))
        held[0].zero_()
        torch.testing.assert_close(compiled(batches[1]), held[1])


def test_new_shapes_and_dtypes_are_planned_anew_in_one_arena():
    model = Small().eval()
    compiled = memopt.compile(model, backend="static")
    with torch.no_grad():
        for rows in (3, 50, 3, 7):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(compiled(x), model(x))
        model.double()
        compiled = memopt.compile(model, backend="static")
        torch.testing.assert_close(compiled(x.double()), model(x.double()))
    arenas = compiled._memopt.options.engine._arenas
    assert len(arenas) == 1


def test_another_shape_dtype_or_layout_than_planned_is_refused():
    x = torch.randn(4, 6)
    function = bound(capture(Small().eval(), x))
    state = list(capture(Small().eval(), x).state.values())
    function([*state, x])
    for wrong in (torch.randn(5, 6), x.double(), torch.randn(6, 4).t(), x.to("meta")):
        with pytest.raises(ValueError, match=r"input x is .*, but the plan is for float32\[4, 6\]"):
            function([*state, wrong])
    with pytest.raises(TypeError, match="takes 5 arguments, 1 were given"):
        function([x])
    with pytest.raises(ValueError, match="input x is None"):
        function([*state, None])


def test_strides_that_no_element_sees_do_not_matter():
    x = torch.randn(1, 6)
    function = StaticBackend().bind(trace(lambda x: (x.exp().sin(),), x))
    odd = torch.randn(1, 12)[:, :6]
    assert odd.stride() != x.stride()
    assert torch.equal(function([odd])[0], odd.exp().sin())


def test_threads_take_turns():
    model = Small().eval()
    compiled = memopt.compile(model, backend="static")
    batches = [torch.randn(64, 6) for _ in range(8)]
    wrong = []
    with torch.no_grad():
        expected = [model(x) for x in batches]
        compiled(batches[0])

    def work(index):
        with torch.no_grad():
            for _ in range(20):
                if not torch.allclose(compiled(batches[index]), expected[index], atol=1e-6):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_training_is_refused():
    compiled = memopt.compile(Small(), backend="static")
    with pytest.raises(RuntimeError, match=r'backend "static" runs inference only: call the model under torch.no_grad'):
        compiled(torch.randn(2, 6))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_both_guards_work(guard):
    model, x = Small().eval(), torch.randn(3, 6)
    compiled = memopt.compile(model, backend="static")
    for _ in range(2):
        with guard():
            torch.testing.assert_close(compiled(x), model(x))


def test_weights_that_change_are_seen():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    compiled = memopt.compile(model, backend="static")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
            model[0].weight.mul_(1.5)
            model[1].running_mean.add_(1)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        x.mul_(2)
        return x.exp() + self.calls


def test_mutations_reach_the_caller():
    compiled, twin = memopt.compile(Counts().eval(), backend="static"), Counts().eval()
    a, b = torch.ones(4), torch.ones(4)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(a), twin(b))
            assert torch.equal(a, b) and torch.equal(compiled.calls, twin.calls)


def test_the_arena_grows_and_is_let_go():
    backend = StaticBackend()
    small, large = torch.randn(4, 4), torch.randn(64, 64)
    first = backend.bind(trace(lambda x: (x.exp().sin().cos(),), small))
    second = backend.bind(trace(lambda x: (x.exp().sin().cos(),), large))
    for _ in range(2):
        torch.testing.assert_close(first([small])[0], small.exp().sin().cos())
        torch.testing.assert_close(second([large])[0], large.exp().sin().cos())
    assert first._arena is second._arena
    assert first._arena.memory.numel() == max(first.plan.arena_bytes, second.plan.arena_bytes)


def test_a_released_arena_is_not_kept_by_garbage():
    x = torch.randn(64, 64)
    function = StaticBackend().bind(trace(lambda x: (x.exp().sin().cos(),), x))

    def views():
        return [item for item in gc.get_objects() if type(item) is torch.Tensor and item.data_ptr() == place]

    gc.disable()
    try:
        function([x])
        place = function._arena.memory.data_ptr()
        assert len(views()) > 1
        function.release()
        assert not views()
    finally:
        gc.enable()
    torch.testing.assert_close(function([x])[0], x.exp().sin().cos())


def test_what_operators_allocate_is_released():
    x = torch.randn(64, 64)
    function = StaticBackend().bind(trace(lambda x: (x.exp().flip(0).sin().flip(1).cos().sum(),), x))
    assert function.plan.operator_bytes == x.numel() * 4 and function.plan.output_bytes == 4
    function([x])
    again = measure(lambda: function([x]), device="cpu")
    assert again.peak_bytes == x.numel() * 4 and again.end_bytes == 4


def test_random_draws_are_those_of_eager():
    x = torch.randn(8, 8)
    program = trace(lambda x: (x + torch.ops.aten.rand_like(x), torch.ops.aten.bernoulli(x.sigmoid())), x)
    function = StaticBackend().bind(program)
    torch.manual_seed(3)
    expected = program.run(x)
    torch.manual_seed(3)
    found = function([x])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_condition_is_left_to_itself():
    class Branches(nn.Module):
        def forward(self, x, flag):
            return torch.cond(flag, lambda x: x.sin(), lambda x: x.cos(), (x.exp(),)).neg()

    x = torch.randn(8, 3)
    compiled = memopt.compile(Branches().eval(), backend="static", verify=False)
    with torch.no_grad():
        for flag in (True, False):
            expected = x.exp().sin() if flag else x.exp().cos()
            torch.testing.assert_close(compiled(x, torch.tensor(flag)), expected.neg())


def test_the_engine_survives_pickling():
    assert pickle.loads(pickle.dumps(StaticBackend())).name == "static"


def test_plans_need_no_device():
    with torch.device("meta"):
        model = memopt.models.build("resnet50").eval()
        inputs = model.example_inputs(1)
    plan, _ = plan_for(PassManager(memopt.INFERENCE[:1], verify=False).run(capture(model, **inputs))[0])
    assert plan.steps


def test_no_program_keeps_an_arena_that_was_too_small():
    backend = StaticBackend()
    small, large = torch.randn(4, 4), torch.randn(64, 64)
    first = backend.bind(trace(lambda x: (x.exp().sin().cos(),), small))
    second = backend.bind(trace(lambda x: (x.exp().sin().cos(),), large))
    first([small])
    before = weakref.ref(first._arena.memory.untyped_storage())
    second([large])
    assert before() is None
    torch.testing.assert_close(first([small])[0], small.exp().sin().cos())
