"""Inference as Inductor code: weights once, large results apart, wrong use, and layouts by measurement."""

import gc
import threading

import pytest
import torch
from torch import nn

import memopt
from memopt.backends import eager_epilogue
from memopt.backends.eager_epilogue import split_epilogue
from memopt.backends.inductor import InductorBackend
from memopt.backends.static import Arena
from memopt.compilation import layout
from memopt.inductor.inference import InductorFunction, _compiled_module
from tests.backends.programs import perceptron, program_and_arguments
from tests.support import capture

# -- large results ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_compiler")
def test_what_is_left_out_is_inductor_s_code_too(monkeypatch):
    monkeypatch.setattr(eager_epilogue, "_LARGE", 1)
    model, x = perceptron(), torch.randn(4, 8)
    program, arguments = program_and_arguments(model, x)
    split = split_epilogue(program, _compiled_module)
    found = split.finish(split.head.run(*arguments), arguments, lambda value: value.clone())
    torch.testing.assert_close(found[0], model(x))


# -- wrong use ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_compiler")
def test_wrong_inputs_are_refused_in_one_line():
    model, x = perceptron(), torch.randn(4, 8)
    program, arguments = program_and_arguments(model, x)
    function = InductorFunction(program, Arena(torch.device("cpu")))
    torch.testing.assert_close(function(list(arguments))[0], model(x))
    for wrong in (torch.randn(5, 8), torch.randn(4, 8).double(), torch.randn(8, 4).t(), 3):
        with pytest.raises(ValueError, match="but the plan is for") as caught:
            function([*arguments[:-1], wrong])
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="arguments, 1 were given"):
        function([x])


@pytest.mark.usefixtures("_compiler")
def test_shapes_and_dtypes_change_results_are_held_and_threads_take_turns():
    model = perceptron()
    compiled = memopt.compile(model)
    batches = [torch.randn(n, 8) for n in (4, 4, 6, 4)]
    expected = [model(x) for x in batches]
    found = [None] * len(batches)
    with torch.no_grad():
        held = [compiled(x) for x in batches]
    for a, b in zip(held, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert {"compiling kernels", "timing engines"} <= compiled.report.seconds.keys()

    def call(index):
        with torch.no_grad():
            for _ in range(20):
                found[index] = compiled(batches[index])

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    compiled.double()
    with torch.no_grad():
        torch.testing.assert_close(compiled(batches[0].double()), model(batches[0].double()))


# -- layouts ------------------------------------------------------------------------------------------------------


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


@pytest.mark.usefixtures("_compiler")
def test_weights_are_laid_out_where_that_is_faster_and_nothing_else_changes(monkeypatch):
    monkeypatch.setattr(layout, "is_faster_channels_last", lambda program: True)
    model, x = convolutional(), torch.randn(2, 3, 12, 12)
    parameters, state = list(model.parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
        compiled = memopt.compile(model, backend="inductor")
        found = compiled(x)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
        assert model[3].weight.is_contiguous(memory_format=torch.channels_last)
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key])
        model[3].weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.usefixtures("_compiler")
def test_weights_that_something_else_refers_to_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(layout, "is_faster_channels_last", lambda program: True)
    model, x = convolutional(), torch.randn(2, 3, 12, 12)
    alias = model[3].weight.detach()
    compiled = memopt.compile(model, backend="inductor")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        alias.mul_(3)
        torch.testing.assert_close(compiled(x), model(x))
    assert alias.data_ptr() == model[3].weight.data_ptr()


@pytest.mark.usefixtures("_compiler")
def test_weights_that_get_other_values_stay_where_they_lie(monkeypatch):
    asked = []
    monkeypatch.setattr(layout, "is_faster_channels_last", lambda program: asked.append(program) is not None)
    model, x = convolutional(), torch.randn(2, 3, 12, 12)
    compiled = memopt.compile(model, backend="inductor")
    with torch.no_grad():
        compiled(x)
        model[0].weight.mul_(2)  # folded anew
        torch.testing.assert_close(compiled(x), model(x))
        assert len(asked) == 1
        compiled(x[:1])  # another graph
        assert len(asked) == 2


def test_tied_and_shared_parameters_do_not_move():
    model = nn.ModuleList([nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)])
    model[1].weight = model[0].weight
    assert layout.movable_parameters(model) >= {"2.weight"}
    assert not layout.movable_parameters(model) & {"0.weight", "1.weight"}


def test_layouts_are_timed_where_the_program_runs():
    program = capture(convolutional(), torch.randn(2, 3, 12, 12))
    state = torch.random.get_rng_state()
    assert layout.is_faster_channels_last(program) in (True, False)
    assert torch.equal(torch.random.get_rng_state(), state)


# -- weights once -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_weights_are_held_once_and_all_is_one_graph():
    gc.collect()  # graphs of other tests
    before_it = torch.cuda.memory_allocated()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8))).eval().cuda().half()
    x = torch.randn(16, 2048, device="cuda", dtype=torch.float16)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    compiled = memopt.compile(model, backend=InductorBackend())
    with torch.no_grad():
        expected = model(x)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-2, atol=1e-2)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before_it < 1.5 * weights


@pytest.mark.gpu
def test_the_default_on_a_gpu_equals_eager_and_results_may_be_held():
    model = memopt.models.build("resnet18").eval().cuda()
    batches = [torch.randn(4, 3, 64, 64, device="cuda") for _ in range(3)]
    compiled = memopt.compile(model)
    with torch.no_grad():
        held = [compiled(x) for x in batches]
        for x, result in zip(batches, held, strict=True):
            torch.testing.assert_close(result, model(x), rtol=2e-2, atol=2e-2)
    assert compiled.report.backend in ("inductor", "static")


@pytest.mark.gpu
def test_a_large_result_is_made_once_on_a_gpu():
    model = memopt.models.build("gpt2", layers=2).eval().cuda().half()
    inputs = model.example_inputs(4, sequence=512)
    compiled = memopt.compile(model, backend="inductor")
    with torch.no_grad():
        expected = model(**inputs)
        compiled(**inputs)
        first = compiled(**inputs)
        torch.testing.assert_close(first, expected, rtol=2e-2, atol=2e-2)
        second = compiled(**inputs)
    assert first.data_ptr() != second.data_ptr() and torch.equal(first, second)


@pytest.mark.gpu
def test_a_budget_on_a_gpu_is_kept_by_what_is_reserved():
    model = memopt.models.build("unet").eval().cuda().half()
    inputs = model.example_inputs(8, resolution=256)
    with torch.no_grad():
        expected = model(**inputs)
        free = memopt.compile(model, verify=False)
        free(**inputs)
        budget = int(free.report.peak_bytes * 0.9)
        torch._dynamo.reset()
        del free
        compiled = memopt.compile(model, budget, verify=False)
        for _ in range(2):
            torch.testing.assert_close(compiled(**inputs), expected, rtol=5e-2, atol=5e-2)
        assert compiled.report.peak_bytes <= budget
