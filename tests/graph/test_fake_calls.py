from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.capture.export import from_module
from memopt.capture.joint import constants_to_attributes
from memopt.graph import fake_calls
from memopt.graph.propagation import run_fake
from memopt.memory.aliasing import analyse
from memopt.program import Program, ProgramError

aten = torch.ops.aten


class _Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).relu().view(-1).sin()


def _program() -> Program:
    return from_module(_Chain(), (torch.randn(4, 6),), {})


def _node(program: Program, target: object) -> torch.fx.Node:
    return next(node for node in program.calls if node.target is target)


def test_what_was_left_alone_keeps_its_value() -> None:
    before = _program()
    after = before.copy()
    _node(after, aten.sin.default).target = aten.cos.default
    runs = run_fake(before.graph_module), run_fake(after.finish().graph_module)
    old, new = ({node.name: value for node, value in found.items()} for found in runs)
    assert [name for name in old if old[name] is not new[name]] == [_node(before, aten.sin.default).name]


def test_operands_of_another_layout_are_run_again() -> None:
    program = _program().copy()
    with program.graph.inserting_before(_node(program, aten.relu.default)):
        wide = program.graph.call_function(aten.cat.default, ([_node(program, aten.add.Tensor)] * 2,))
    _node(program, aten.relu.default).args = (wide,)
    finished = program.finish()
    assert [tuple(node.meta["val"].shape) for node in finished.calls] == [(4, 6), (8, 6), (8, 6), (48,), (48,)]
    finished.check()


def test_numbers_of_another_type_are_run_again() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1

    program = from_module(Scaled(), (torch.ones(3, dtype=torch.int64),), {}).copy()
    node = program.calls[0]
    node.args = (node.args[0], 1.0)
    assert program.finish().calls[0].meta["val"].dtype is torch.float32


def test_a_view_follows_the_memory_of_its_operand() -> None:
    program = _program().copy()
    relu = _node(program, aten.relu.default)
    with program.graph.inserting_after(relu):
        twin = program.graph.call_function(aten.neg.default, (relu,))
    view = next(iter(user for user in relu.users if user is not twin))
    view.replace_input_with(relu, twin)
    finished = program.finish()
    found = analyse(finished)
    neg, moved = _node(finished, aten.neg.default), next(node for node in finished.calls if node.name == view.name)
    assert found.of[moved] == found.of[neg] != found.of[_node(finished, aten.relu.default)]


def test_a_copied_node_has_memory_of_its_own() -> None:
    program = _program().copy()
    relu = _node(program, aten.relu.default)
    with program.graph.inserting_after(relu):
        again = program.graph.node_copy(relu, lambda node: node)
    again.meta = dict(relu.meta)
    found = analyse(program.finish())
    assert found.of[again] != found.of[relu]


def test_a_value_put_in_by_hand_is_found_out() -> None:
    program = _program()
    node = _node(program, aten.relu.default)
    node.meta["val"] = node.meta["val"].new_empty(2, 2)
    with pytest.raises(ProgramError, match="its operation gives"):
        program.check()


def test_a_call_that_holds_the_same_arguments_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program()
    looked_at: list[str] = []
    call_of = fake_calls.call_of

    def counted(node: torch.fx.Node, *rest: Any) -> fake_calls.Call:
        looked_at.append(node.name)
        return call_of(node, *rest)

    monkeypatch.setattr(fake_calls, "call_of", counted)
    copy = program.copy()
    values = run_fake(program.graph_module), run_fake(copy.graph_module)
    assert [*values[0].values()] == [*values[1].values()]
    assert not looked_at
    view = _node(copy, aten.view.default)
    view.args = (view.args[0], [-1])  # the same, but not the very same: looked at, not run
    assert run_fake(copy.graph_module)[view] is values[1][view]
    assert looked_at == [view.name]
    view.args = (view.args[0], [2, -1])
    assert run_fake(copy.graph_module)[view].shape == (2, 12)
    assert looked_at[1:] == [node.name for node in (view, *view.users)]


def test_arguments_that_may_change_by_themselves_are_looked_at() -> None:
    program = _program()
    node = _node(program, aten.relu.default)
    kept = node.meta[fake_calls.MARK]
    values = run_fake(program.graph_module)
    mode = kept.call.mode
    assert fake_calls.unchanged(node, values, mode)[0]
    node.meta[fake_calls.MARK] = dataclasses.replace(kept, call=dataclasses.replace(kept.call, plain=False))
    assert not fake_calls.unchanged(node, values, mode)[0]


def test_a_convolution_is_run_again_where_other_libraries_may_run_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    program = from_module(model, (torch.randn(2, 3, 8, 8),), {})
    conv, copy = _node(program, aten.convolution.default), program.copy()
    known = run_fake(program.graph_module)[conv]
    assert run_fake(copy.graph_module)[_node(copy, aten.convolution.default)] is known
    torch._C._set_mkldnn_enabled(False)
    try:
        plain = run_fake(program.graph_module)[conv]
        assert plain is not known and plain is run_fake(program.graph_module)[conv]
    finally:
        torch._C._set_mkldnn_enabled(True)
    again = run_fake(program.graph_module)[conv]
    assert again is not plain and again.stride() == known.stride()


def test_nothing_is_kept_in_modules_that_engines_get() -> None:
    module = constants_to_attributes(_program())
    assert not [node for node in module.graph.nodes if fake_calls.MARK in node.meta]


@pytest.mark.parametrize("target", [torch.ops.aten._log_softmax.default, torch.ops.aten._softmax.default])
def test_rows_with_gaps_on_a_device_that_is_not_here(target: object) -> None:
    with FakeTensorMode():
        logits = aten.slice.Tensor(torch.empty(6, 16, device="cuda", dtype=torch.bfloat16), 1, 0, 13)
        found = fake_calls.run(target, (logits, 1, False), {})
    assert found.shape == (6, 13) and found.is_contiguous() and found.device.type == "cuda"


@pytest.mark.parametrize(
    "image",
    [
        torch.ones(3, 2).t(),
        torch.ones(2, 5, 3).permute(0, 2, 1),
        torch.ones(2, 5, 4, 3).permute(0, 3, 2, 1),
        torch.ones(2, 6, 8, 5).to(memory_format=torch.channels_last)[:, :3],
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(2, 3, 4, 5, 6).permute(1, 0, 2, 3, 4),
    ],
    ids=lambda image: str(image.stride()),
)
def test_a_batch_norm_of_a_cpu_lies_as_its_kernel_has_it(image: torch.Tensor) -> None:
    """Torch's rules for fake tensors have it lie as its image does."""
    channels, aten = torch.ones(image.shape[1]), torch.ops.aten
    forward = (image, channels, channels, channels, channels)
    calls = [
        (aten.native_batch_norm.default, (*forward, True, 0.1, 1e-5)),
        (aten._native_batch_norm_legit_no_training.default, (*forward, 0.1, 1e-5)),
        (aten._native_batch_norm_legit_functional.default, (*forward, True, 0.1, 1e-5)),
        (aten.native_batch_norm_backward.default, (image, *forward, channels, True, 1e-5, [True, True, True])),
    ]
    for target, args in calls:
        real = target(*args)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args]
            fake = fake_calls.run(target, tuple(fakes), {})
        assert [value.stride() for value in fake] == [value.stride() for value in real], target


@pytest.mark.parametrize("compiled", [False, True], ids=["without cuDNN", "with cuDNN and no GPU"])
def test_a_convolution_of_a_device_that_is_not_here_lies_as_cudnn_lays_it_out(monkeypatch, compiled):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: compiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with FakeTensorMode():
        x, w = (torch.empty(2, 8, 4, 4, device="cuda"), torch.empty(8, 8, 3, 3, device="cuda"))
        arguments = (x.to(memory_format=torch.channels_last), w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        found = fake_calls.run(torch.ops.aten.convolution.default, arguments, {})
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_what_was_found_of_a_call_is_known_of_one_on_others_that_lie_alike_and_repeat_alike() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() + x.cos()

    program = from_module(Sum(), (torch.randn(4, 6),), {})
    call = fake_calls.behind(_node(program, aten.add.Tensor))
    assert call is not None
    call.facts["told"] = 1
    other = program.copy()
    first, second = _node(other, aten.sin.default), _node(other, aten.cos.default)
    total = _node(other, aten.add.Tensor)
    total.args = (second, first)
    turned = fake_calls.behind(_node(other.finish(), aten.add.Tensor))
    assert turned is not None and turned is not call and turned.facts is call.facts
    total.args = (first, first)
    twice = fake_calls.behind(_node(other.finish(), aten.add.Tensor))
    assert twice is not None and twice.facts == {}
