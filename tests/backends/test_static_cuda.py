"""The static backend on a GPU: equal to eager, one graph, results that may be held, streams that take turns."""

import dataclasses

import pytest
import torch

import memopt
from memopt.backends.cuda_graph import Replay
from memopt.backends.static import StaticBackend
from memopt.pass_manager import PassManager
from tests.end_to_end import FAMILIES, build
from tests.support import capture
from tests.test_inference import floats

pytestmark = pytest.mark.gpu


def on_gpu(name):
    model, inputs = build(name, labels=False)
    return model.eval().cuda(), {key: value.cuda() for key, value in inputs.items()}


def compiled_with(model, graphs):
    compiled = memopt.compile(model, backend="static", verify=False)
    compiled._memopt.options = dataclasses.replace(compiled._memopt.options, engine=StaticBackend(graphs=graphs))
    return compiled


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_models_equal_eager(name, graphs):
    model, inputs = on_gpu(name)
    compiled = compiled_with(model, graphs)
    with torch.no_grad():
        expected = floats(model(**inputs))
        first, second = floats(compiled(**inputs)), floats(compiled(**inputs))
        for eager, a, b in zip(expected, first, second, strict=True):
            torch.testing.assert_close(a, eager, rtol=2e-3, atol=2e-3)
            assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("graphs", [False, True])
def test_inputs_change_and_results_are_held(graphs):
    model, inputs = on_gpu("resnet18")
    program, _ = PassManager(memopt.INFERENCE, verify=False).run(capture(model, **inputs))
    function = StaticBackend(graphs=graphs).bind(program)
    state = [program.state[e.name] for e in program.inputs if e.name in program.state and e.kind.value != "constant"]
    batches = [torch.randn_like(inputs["images"]) for _ in range(4)]
    with torch.no_grad():
        held = [function([*state, x])[0] for x in batches]
        for x, result in zip(batches, held, strict=True):
            torch.testing.assert_close(result, model(x), rtol=2e-3, atol=2e-3)
    assert isinstance(function._run, Replay) is graphs
    assert not graphs or function._run._graph is not None


def test_a_steady_call_reserves_nothing_new():
    model, inputs = on_gpu("densenet121")
    compiled = compiled_with(model, True)
    with torch.no_grad():
        for _ in range(3):
            compiled(**inputs)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            compiled(**inputs)
        assert torch.cuda.max_memory_reserved() == before


@pytest.mark.parametrize("graphs", [False, True])
def test_streams_take_turns(graphs):
    model, inputs = on_gpu("resnet18")
    compiled = compiled_with(model, graphs)
    batches = [torch.randn_like(inputs["images"]) for _ in range(8)]
    with torch.no_grad():
        expected = [model(x) for x in batches]
        compiled(**inputs)
        streams = [torch.cuda.Stream() for _ in batches]
        torch.cuda.synchronize()
        found = []
        for stream, x in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                found.append(compiled(images=x))
        torch.cuda.synchronize()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_a_result_that_is_an_input_is_not_captured():
    class Through(torch.nn.Module):
        def forward(self, x):
            return x.view(-1), x.exp()

    compiled = compiled_with(Through().eval(), True)
    x = torch.randn(4, 4, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            same, other = compiled(x)
            assert same.data_ptr() == x.data_ptr() and torch.equal(other, x.exp())
