"""Generated code: views of the arena made once, the rest at each call, nothing held longer than it is read."""

import re

import torch

from memopt.backends.static import plan_for
from memopt.memory.buffers import Home
from memopt.passes.inplace import Inplace
from memopt.program import InputKind
from memopt.static.code import Name, generate
from tests.passes.build import trace

aten = torch.ops.aten
X = torch.randn(4, 6, dtype=torch.float64)


def code_of(program):
    return generate(program, *plan_for(program))


def lines(code):
    return [line.strip() for line in code.source.splitlines()]


def run(program, *tensors):
    code = code_of(program)
    memory = torch.full((plan_for(program)[0].arena_bytes,), 255, dtype=torch.uint8)
    function = code.bind(memory)
    for _ in range(2):  # what the first call left in the arena does not matter
        found = function(*tensors)
    torch.testing.assert_close(found, program.run(*tensors), rtol=1e-12, atol=1e-12)
    assert all(value.untyped_storage().data_ptr() != memory.data_ptr() for value in found)
    return code


def test_intermediates_are_names_in_the_arena_and_results_are_fresh():
    code = run(trace(lambda x: (x.exp().sin(),), X), X)
    ((offset, place, dtype),) = code.tensors.values()
    assert (offset, place.shape, place.strides, dtype) == (0, (4, 6), (6, 1), torch.float64)
    (name,) = code.tensors
    made = next(line for line in lines(code) if "_empty(" in line).split(" = ")[0]
    assert any(line.startswith("f_") and f"out={name}" in line for line in lines(code))
    assert lines(code)[-1] == f"return [{made}, ]"


def test_views_of_the_arena_are_taken_when_it_is_bound_and_those_of_inputs_at_each_call():
    code = run(trace(lambda x: (x.exp().t().unsqueeze(0).sin(), x.t().sin()), X), X)
    turned, view = code.views
    assert (turned[1], view[1]) == (aten.t.default, aten.unsqueeze.default)
    assert turned[2][0].name in code.tensors and view[2] == (Name(turned[0]), 0)
    assert sum("aten_t_default" in line for line in lines(code)) == 1


def test_what_is_not_read_any_more_is_deleted():
    code = run(trace(lambda x: (x.t().sin().t().cos(),), X), X)  # the first view is an input's
    found = lines(code)
    made = [line.split(" = ")[0] for line in found if re.match(r"v\d+ = ", line)]
    deleted = [name for line in found if line.startswith("del ") for name in line[4:].split(", ")]
    assert len(made) == 2 and deleted == [name for name in made if name not in found[-1]]
    last = max(index for index, line in enumerate(found) if re.search(rf"\b{deleted[0]}\b", line))
    assert found[last] == f"del {deleted[0]}", "nothing reads it after its release"
    assert re.search(rf"\b{deleted[0]}\b", found[last - 1]), "it is released by its last reader"


def test_constants_are_part_of_the_code():
    weight = torch.randn(4, 6, dtype=torch.float64)
    program = trace(lambda x, w: ((x.exp() * w).sum(),), X, weight, kinds={1: InputKind.CONSTANT})
    code = run(program, X)
    assert lines(code)[0] == "def run(a0):"
    assert any(value is program.state[program.inputs[1].name] for value in code.names.values())


def test_an_operator_in_place_writes_over_its_operand():
    program = Inplace().run(trace(lambda x: (x.exp().relu().sum(),), X)).program
    code = run(program, X)
    assert [block.name for block in plan_for(program)[0].blocks if block.home is Home.ARENA] == ["exp"]
    (name,) = code.tensors
    assert sum(f"out={name}" in line for line in lines(code)) == 2


def test_parts_of_a_concatenation_are_copied_only_where_they_could_not_be_written_there():
    joined = run(trace(lambda x: (torch.cat((x.exp(), x.sin())).cos(),), X), X)
    assert not any("copy_" in line for line in lines(joined))
    copied = run(trace(lambda x: (torch.cat((x, x.sin())).cos(),), X), X)
    assert sum("copy_" in line for line in lines(copied)) == 1


def test_several_results_have_names_of_their_own():
    code = run(trace(lambda x: (x.topk(2)[0].exp(), x.topk(2)[1] + 1), X), X)
    assert sum("topk" in line for line in lines(code)) == 2
