"""How Inductor lowers operators of one's own."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from memopt.torch_compat.inductor_compile import compile_graph, compile_traced
from memopt.torch_compat.inductor_lowering import (
    lower_as_call,
    lower_by,
    node_being_lowered,
    writes_over,
)
from tests.inductor.test_peak_lower_bound import needs_compiler


@pytest.fixture(scope="module")
def operators():
    """Operators of a library of these tests: twice a value, twice a value written over it, three times a value."""
    library = torch.library.Library("memopt_lowering_test", "DEF")
    for name, function in (("twice", lambda x: x * 2), ("thrice", lambda x: x * 3)):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, function, "CompositeExplicitAutograd")
        library.impl(name, torch.empty_like, "Meta")
    library.define("twice_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("twice_", lambda x: x.mul_(2), "CompositeExplicitAutograd")
    library.impl("twice_", lambda x: x, "Meta")
    yield torch.ops.memopt_lowering_test
    library._destroy()


def code_of(function, x):
    graph = torch.fx.symbolic_trace(function)
    run = compile_graph(graph, [x], compile_traced, {"fx_graph_cache": False})
    return run_and_get_code(run, x)


@needs_compiler
def test_an_operator_is_called_as_it_is_or_lowered_by_what_is_given(operators):
    seen = []

    def lower(x):
        seen.append(node_being_lowered().target)
        return torch._inductor.lowering.lowerings[torch.ops.aten.mul.Tensor](x, 3)

    lower_as_call(operators.twice.default)
    lower_by(operators.thrice.default, lower)
    x = torch.randn(4)
    run = compile_graph(
        torch.fx.symbolic_trace(lambda x: (operators.thrice.default(operators.twice.default(x) + 1),)),
        [x], compile_traced, {"fx_graph_cache": False},
    )  # fmt: skip
    torch.testing.assert_close(run(x)[0], (x * 2 + 1) * 3)
    assert seen == [operators.thrice.default]


def test_a_form_that_writes_over_its_argument_is_known(operators):
    from torch._inductor.fx_passes.reinplace import inplaceable_ops

    writes_over(operators.twice.default, operators.twice_.default, 0)
    known = inplaceable_ops.pop(operators.twice.default)
    assert (known.inplace_op, known.mutated_arg) == (operators.twice_.default, 0)
