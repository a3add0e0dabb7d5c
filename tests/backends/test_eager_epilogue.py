"""The last products of large results are left out of a graph, and made into memory of the caller's own."""

import pytest
import torch
from torch import nn

from memopt.backends import eager_epilogue
from memopt.backends.aten import emit
from memopt.backends.eager_epilogue import split_epilogue
from memopt.program import InputKind
from tests.backends.programs import perceptron, program_and_arguments
from tests.passes.build import trace
from tests.support import targets


def test_the_last_product_of_a_large_result_is_left_out_of_the_graph(monkeypatch):
    monkeypatch.setattr(eager_epilogue, "_LARGE", 1)
    model, x = perceptron(), torch.randn(4, 5, 8)
    program, arguments = program_and_arguments(model, x)
    split = split_epilogue(program)
    split.head.check()
    assert targets(program).count("aten.addmm.default") == targets(split.head).count("aten.addmm.default") + 1
    outputs = split.head.run(*arguments)
    found = split.finish(outputs, arguments, lambda value: value.clone())
    torch.testing.assert_close(found[0], model(x))


def test_small_results_and_those_that_others_read_stay(monkeypatch):
    model, x = perceptron(), torch.randn(4, 8)
    assert split_epilogue(program_and_arguments(model, x)[0]) is None
    monkeypatch.setattr(eager_epilogue, "_LARGE", 1)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            return y, y.exp()

    assert split_epilogue(program_and_arguments(Both().eval(), x)[0]) is None


def test_small_results_are_copied_and_come_in_their_places(monkeypatch):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 64)

        def forward(self, x):
            return x.sum(-1), self.layer(x.exp())

    monkeypatch.setattr(eager_epilogue, "_LARGE", 200)
    model, x = Two().eval(), torch.randn(4, 8)
    program, arguments = program_and_arguments(model, x)
    split = split_epilogue(program)
    outputs = split.head.run(*arguments)
    copied = []
    found = split.finish(outputs, arguments, lambda value: copied.append(value) or value.clone())
    torch.testing.assert_close(found, list(model(x)))
    assert len(copied) == 1 and copied[0] is outputs[0]


def test_views_after_the_product_go_with_it_and_so_do_views_of_inputs(monkeypatch):
    monkeypatch.setattr(eager_epilogue, "_LARGE", 1)
    x, w = torch.randn(6, 4), torch.randn(5, 4)
    program = trace(lambda x, w: (torch.mm(x.exp(), w.t()).view(2, 15).t(),), x, w)
    split = split_epilogue(program)
    assert [node.name for node in split.head.calls] == ["exp"]
    (found,) = split.finish(split.head.run(x, w), [x, w], lambda value: value)
    (expected,) = program.run(x, w)
    assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_constants_are_read_where_the_program_holds_them(monkeypatch):
    monkeypatch.setattr(eager_epilogue, "_LARGE", 1)
    x, w = torch.randn(6, 4), torch.randn(4, 5)
    program = trace(lambda x, w: (torch.mm(x.exp(), w),), x, w, kinds={1: InputKind.CONSTANT})
    split = split_epilogue(program)
    (found,) = split.finish(split.head.run(x), [x], lambda value: value)
    assert torch.equal(found, program.run(x)[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (torch.mm(x, w).exp(),),  # the last call is a kernel of the graph's own
        lambda x, w: (torch.mm(x, w),) * 2,  # twice the same result
        lambda x, w: ((y := torch.mm(x, w)).view(-1), y.view(5, 6)),  # two results of one product
    ],
)
def test_what_is_not_a_product_s_alone_stays(monkeypatch, function):
    monkeypatch.setattr(eager_epilogue, "_LARGE", 1)
    assert split_epilogue(trace(function, torch.randn(6, 4), torch.randn(4, 5))) is None


def test_new_values_of_buffers_stay(monkeypatch):
    monkeypatch.setattr(eager_epilogue, "_LARGE", 1)
    x, state = torch.randn(4, 4), torch.randn(4, 4)
    program = trace(lambda x, s: (x.sum(), torch.mm(s, x)), x, state, kinds={1: InputKind.BUFFER}, mutated={1: 1})
    assert split_epilogue(program) is None


def test_what_is_left_out_is_lowered_as_it_is_asked(monkeypatch):
    monkeypatch.setattr(eager_epilogue, "_LARGE", 1)
    lowered = []

    def lower(module):
        lowered.append([node.name for node in module.graph.nodes if node.op == "call_function"])
        return emit(module)

    split_epilogue(trace(lambda x, w: (torch.mm(x.exp(), w),), torch.randn(6, 4), torch.randn(4, 5)), lower)
    assert lowered == [["mm"]]
