"""Calls of blocks that repeat: run on fake tensors once, and the results of the others lie as if they were run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import memopt
from memopt.capture.export import from_module
from memopt.difference.recorded import capture_programs
from memopt.graph import equal_calls, fake_calls
from memopt.memory.aliasing import analyse
from memopt.program import tensors_of
from memopt.torch_compat import pytree
from memopt.torch_compat.storages import storage_id

aten = torch.ops.aten


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Unflatten(1, (2, 4)), nn.Flatten())


def test_of_equal_blocks_one_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Counter[str] = Counter()
    run = fake_calls.run

    def counted(target: Any, *rest: Any) -> Any:
        runs[str(target)] += 1
        return run(target, *rest)

    monkeypatch.setattr(fake_calls, "run", counted)
    program = from_module(nn.Sequential(*(_block() for _ in range(4))), (torch.randn(3, 8),), {})
    calls = Counter(str(node.target) for node in program.calls)
    assert max(calls.values()) >= 4
    others = {"aten.view.default", "aten.t.default"}  # to two shapes; of parameters, whose views need gradients too
    assert {name: count for name, count in runs.items() if count > 1 and name not in others} == {}
    program.check()
    memory = analyse(program)
    made = [node for node in program.calls if str(node.target) == "aten.relu.default"]
    assert len({memory.of[node] for node in made}) == 4


@pytest.mark.quick("gpt2_medium", "unet", "llama_1b")
@pytest.mark.parametrize("name", ["gpt2_medium", "resnet50", "unet", "llama_1b"])
def test_results_lie_as_if_they_were_run(name: str) -> None:
    model = memopt.models.build(name, tiny=True)
    (program,) = capture_programs(model, (), model.example_inputs(2, labels=True), training=True)
    told = 0
    for node in program.calls:
        if equal_calls.key_of(node.target, (), [v.meta["val"] for v in node.all_input_nodes], ()) is None:
            continue
        told += 1
        found, expected = tensors_of(node), _run(node)
        assert [_lies(value) for value in found] == [_lies(value) for value in expected], node.name
        given = [tensor for operand in node.all_input_nodes for tensor in tensors_of(operand)]
        for mine, other in zip(found, expected, strict=True):
            shared = [storage_id(mine) == storage_id(tensor) for tensor in given]
            assert shared == [storage_id(other) == storage_id(tensor) for tensor in given], node.name
    assert told > 50


def _run(node: fx.Node) -> list[Tensor]:
    mode = tensors_of(node)[0].fake_mode  # type: ignore[attr-defined]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    with mode, torch.no_grad():
        result = fake_calls.run(node.target, args, kwargs)
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _lies(value: Tensor) -> tuple[object, ...]:
    assert type(value) is FakeTensor
    storage = value.untyped_storage().nbytes()
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, storage


def test_a_view_of_one_of_two_operands_in_one_memory_is_not_told() -> None:
    with FakeTensorMode() as mode:
        whole = torch.empty(4, 4)
        half = whole[:2]
        for operands in ([whole, half], [half, whole]):
            key = equal_calls.key_of(aten.add.Tensor, (fx.Node, fx.Node), operands, ())
            equal_calls.learn(mode, key, operands, half.t())
            assert equal_calls.known(mode, key) is None
        other = torch.empty(2, 4)
        key = equal_calls.key_of(aten.add.Tensor, (fx.Node, fx.Node), [whole, other], ())
        equal_calls.learn(mode, key, [whole, other], other.t())
        told = equal_calls.known(mode, key)
        assert told is not None
        third = torch.empty(2, 4)
        made = told.made(mode, [whole, third])
    assert storage_id(made) == storage_id(third) and made.stride() == (1, 4)


def test_what_depends_on_more_than_layouts_is_not_told() -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(3)
        assert equal_calls.key_of(len, (), [x], ()) is None  # no operator
        assert equal_calls.key_of(aten.neg.default, (), [3], ()) is None
        assert equal_calls.key_of(aten.neg.default, (), [x.to(torch.complex64).conj()], ()) is None
        assert equal_calls.key_of(aten.neg.default, (), [torch.empty(3).to_sparse()], ()) is None
        constant = mode.from_tensor(torch.ones(3))
        constant.constant = torch.ones(3)
        assert equal_calls.key_of(aten.neg.default, (), [constant], ()) is None
        key = equal_calls.key_of(aten.neg.default, (fx.Node,), [x], ())
        for odd in (x, 3, torch.empty(6)[1:], torch.empty(3, requires_grad=True)):
            equal_calls.learn(mode, key, [x], odd)
            assert equal_calls.known(mode, key) is None


def test_settings_and_operands_tell_calls_apart() -> None:
    with FakeTensorMode() as mode:
        x, y = torch.empty(3, 4), torch.empty(4, 3).t()
        key = equal_calls.key_of(aten.neg.default, (fx.Node,), [x], (1,))
        equal_calls.learn(mode, key, [x], torch.empty(3, 4))
        assert equal_calls.known(mode, key) is not None
        for other in (
            equal_calls.key_of(aten.neg.default, (fx.Node,), [x], (2,)),
            equal_calls.key_of(aten.neg.default, (fx.Node,), [y], (1,)),
            equal_calls.key_of(aten.neg.default, (fx.Node, 1), [x], (1,)),
        ):
            assert equal_calls.known(mode, other) is None
    with FakeTensorMode() as another:
        assert equal_calls.known(another, key) is None
