"""Which results may lie in an operand's memory: by operator, with the same bits, and by what else the node reads."""

import operator

import pytest
import torch

from memopt.memory.aliasing import analyse
from memopt.memory.over_operands import WriteOver, inplace_overload, may_lie_in
from memopt.step.encode_step import lower
from tests.passes.test_inplace import trace
from tests.support import allocations

aten = torch.ops.aten


def example(kind, dtype):
    shape = (8, 8)
    if kind == "mask":
        return torch.rand(shape) > 0.5
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    return (torch.rand(shape) * 0.8 + 0.1).to(dtype) if dtype.is_floating_point else torch.randint(1, 5, shape)


def arguments(target, dtype):
    found = []
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            found.append(example(argument.name, dtype))
        elif argument.has_default_value():
            break
        elif kind in ("number", "float"):
            found.append(0.5 if dtype.is_floating_point else 2)
        elif kind in ("int", "bool"):
            found.append(argument.name != "is_result" and int(kind == "int"))
        elif kind.startswith("Optional"):
            found.append(0.25 if "number" in kind else None)
        else:
            raise AssertionError(f"{target}: {argument.name} is {kind}")
    return found


def elementwise_operators():
    packets = (getattr(aten, name) for name in dir(aten) if not name.startswith("_"))
    overloads = (
        getattr(packet, name)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for name in packet.overloads()
    )
    return [overload for overload in overloads if inplace_overload(overload) is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_every_inplace_form_gives_the_same_bits(dtype):
    tried = 0
    for target in elementwise_operators():
        given = arguments(target, dtype)
        try:
            expected = target(*given)
        except (RuntimeError, TypeError):
            continue  # not defined for this type
        if expected.dtype != given[0].dtype or expected.shape != given[0].shape:
            continue
        copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in given]
        result = inplace_overload(target)(*copies)
        assert result.data_ptr() == copies[0].data_ptr(), target
        assert torch.equal(torch.nan_to_num(result), torch.nan_to_num(expected)), target
        for value, copy in zip(given[1:], copies[1:], strict=True):
            assert not isinstance(value, torch.Tensor) or torch.equal(value, copy), target
        tried += 1
    assert tried >= {torch.float32: 100, torch.bfloat16: 90, torch.int64: 50, torch.bool: 25}[dtype]


def test_inplace_forms_allocate_nothing():
    for target in [
        aten.relu.default,
        aten.add.Tensor,
        aten.gelu.default,
        aten.gelu_backward.default,
        aten.maximum.default,
    ]:
        given = arguments(target, torch.float32)
        call = inplace_overload(target)
        assert sum(size for size in allocations(lambda: call(*given)) if size > 16) == 0, target  # noqa: B023


def test_inplace_overloads_by_name():
    assert inplace_overload(aten.relu.default) is aten.relu_.default
    assert inplace_overload(aten.add.Tensor) is aten.add_.Tensor
    assert inplace_overload(aten.pow.Tensor_Scalar) is aten.pow_.Scalar
    assert inplace_overload(aten.silu_backward.default) == WriteOver(aten.silu_backward.grad_input)
    for target in [aten.mm.default, aten.polygamma.default, aten.cumsum.default, aten.relu_.default, operator.getitem]:
        assert inplace_overload(target) is None


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        (lambda y, z: y.mul(z), ["mm"]),
        (lambda y, z: y.mul(y), ["mm"]),
        (lambda y, z: y.mul(y.t()), []),  # in another order too
        (lambda y, z: torch.addmm(y, z, z), ["mm"]),
        (lambda y, z: torch.addmm(y, y, z), []),  # it is multiplied as well
        (lambda y, z: y > z, []),  # of another type
        (lambda y, z: z[0] * y, []),  # wider than the first operand
    ],
)
def test_a_result_lies_in_what_is_read_index_by_index(function, operands):
    program = trace(lambda x: (function(x @ x, x + 1),), torch.randn(5, 5))
    held = analyse(program).of
    node = program.output_nodes[0]
    assert [operand.name for operand in may_lie_in(node, held.__getitem__)] == operands
    node.meta["kernel"] = True  # one that is generated writes over what has its size, whichever operand it is
    assert may_lie_in(node, held.__getitem__) == node.all_input_nodes


def test_what_is_computed_where_it_is_read_reads_its_operands_once_more():
    program = trace(lambda x: ((lambda y: y + y.exp())(x @ x),), torch.randn(5, 5))
    product, fused, total = program.calls
    held = {product: (0,), fused: (0, 1), total: (2,)}
    assert may_lie_in(total, held.__getitem__) == []


@pytest.mark.parametrize("first", [True, False])
def test_a_plan_counts_on_no_operand_that_what_runs_does_not_write_over(first):
    """Of two operands of the result's size one is made for it: it is written over where it is the first."""

    def function(x, tangent):
        output, made = x.exp(), tangent @ tangent
        return output, made * x if first else x * made

    program = trace(function, torch.randn(5, 5), torch.randn(5, 5), backward_from=1)
    lowering = lower(program, {})
    over = {lowering.aliasing.storages[made].producer.name for made, _ in lowering.over}
    assert over == ({"mul"} if first else set())
