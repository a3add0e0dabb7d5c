"""Views that change nothing go, views of views become one, and the others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memopt.passes.eliminate_copies import EliminateCopies
from tests.passes.build import capture_joint, reasons
from tests.passes.test_eliminate_copies import X, aten, names, swept
from tests.support import apply


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.detach(),
        lambda x: aten.alias(x),
        lambda x: aten.view(x, [3, 4]),
        lambda x: aten._unsafe_view(x, [3, 4]),
        lambda x: aten.expand(x, [3, 4]),
        lambda x: aten.permute(x, [0, 1]),
        lambda x: aten.transpose(x, 0, 0),
        lambda x: aten.squeeze(x),
        lambda x: aten.slice(x, 1, 0, 4),
        lambda x: aten.slice(x, 1, 0, 9223372036854775807),
        lambda x: aten.split(x, 3)[0],
        lambda x: aten.split_with_sizes(x, [4], 1)[0],
        lambda x: aten.as_strided(x, [3, 4], [4, 1]),
        lambda x: x.t().t(),
        lambda x: x.permute(1, 0).transpose(0, 1),
        lambda x: x.view(12).view(3, 4),
        lambda x: x.view(2, 6).view(4, 3).view(3, 4),
        lambda x: x.unsqueeze(1).squeeze(1),
        lambda x: x.unsqueeze(0).expand(1, 3, 4).squeeze(0),
        lambda x: x.view(3, 2, 2).permute(2, 0, 1).permute(1, 2, 0).view(3, 4),
    ],
)
def test_views_that_change_nothing_go(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    result = swept(lambda x: (view(x.sin()).cos(),), X)
    assert names(result) == ["sin", "cos"]
    assert result.refusals == ()


@pytest.mark.parametrize(
    "view, left",
    [
        (lambda x: x.view(2, 6).view(12), ["view"]),
        (lambda x: x.unsqueeze(1).view(12), ["view"]),
        (lambda x: x.view(3, 2, 2).transpose(0, 1).permute(2, 0, 1), ["view", "permute"]),
        (lambda x: x.view(3, 2, 2).permute(2, -2, 0).transpose(-1, 0), ["view"]),
        (lambda x: x.t().permute(1, 0).t(), ["t"]),
        (lambda x: x.unsqueeze(1).expand(3, 2, 4).expand(5, 3, 2, 4), ["unsqueeze", "expand"]),
        (lambda x: x.view(4, 3).view(2, 6).view(6, 2).view(12), ["view"]),
    ],
)
def test_views_of_views_become_one(view: Callable[[torch.Tensor], torch.Tensor], left: list[str]) -> None:
    result = swept(lambda x: (view(x.sin()).cos(),), X)
    assert names(result) == ["sin", *left, "cos"]


@pytest.mark.parametrize(
    "view, left",
    [
        (lambda x: x.view(12), ["view"]),
        (lambda x: x.t(), ["t"]),
        (lambda x: x[:, 1:], ["slice"]),
        (lambda x: x[1:][:2], ["slice", "slice"]),
        (lambda x: x.split(2, 1)[0], ["split"]),
        (lambda x: x[:, :1].expand(3, 4), ["slice", "expand"]),
        (lambda x: aten.view(x.t().unsqueeze(0), [4, 3]), ["t", "unsqueeze", "view"]),
        (lambda x: x.t().unsqueeze(0).transpose(0, 2), ["t", "unsqueeze", "transpose"]),
        (lambda x: aten.view.dtype(x, torch.int32), ["view"]),
    ],
)
def test_views_that_change_something_stay(view: Callable[[torch.Tensor], torch.Tensor], left: list[str]) -> None:
    result = swept(lambda x: (view(x.sin()).abs(),), X)
    assert len(names(result)) <= len(left) + 2
    assert names(result)[0] == "sin" and names(result)[-1] == "abs"
    assert len(result.changes) <= 1


def test_a_view_that_only_the_inner_one_has_stays() -> None:
    """A fake tensor grants a flat view of these strides, and a real one has none."""
    x = torch.empty_strided((2, 1, 3), (1, 2, 2)).copy_(torch.arange(6.0).reshape(2, 1, 3))
    result = swept(lambda x: (aten.view.default(aten.transpose.int(x, 0, 2), [6]).sin(),), x)
    assert names(result) == ["transpose", "view", "sin"]


def test_conjugate_views_stay() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    result = swept(lambda x: (aten._conj(x.sin()).cos(), aten._conj(aten._conj(x.exp())).cos()), x)
    assert names(result).count("_conj") >= 1


def test_an_inner_view_that_is_read_elsewhere_stays() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = x.sin().view(2, 6)
        return inner.view(12).cos(), inner.exp()

    result = swept(function, X)
    assert names(result) == ["sin", "view", "view", "cos", "exp"]
    assert result.changes == ()


def test_equal_views_of_one_tensor_become_the_first() -> None:
    result = swept(lambda x: (x.sin() @ x.t() + x.sin() @ x.permute(1, 0),), X)
    assert names(result) == ["sin", "t", "mm", "sin", "mm", "add"]


def test_a_view_that_is_an_output_stays_an_object_of_its_own() -> None:
    result = swept(lambda x: (x.view(3, 4), x.sin()), X)
    assert names(result) == ["view", "sin"]
    assert reasons(result) == {"view": "equals x_1, but is returned as a tensor of its own"}


def test_what_was_detached_and_is_returned_stays_detached() -> None:
    program = capture_joint(lambda x: (x.sum(), x.sin().detach()), X.clone().requires_grad_())
    result = apply(EliminateCopies(), program)
    assert "detach" in names(result)
    assert reasons(result) == {
        "detach": "what is returned of it requires no gradient, unlike what it was detached from",
    }


def test_two_outputs_that_show_the_same_stay_two() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        return y, y.view(3, 4)

    assert set(reasons(swept(function, X))) == {"view"}


def test_a_view_that_is_an_output_may_become_what_it_shows() -> None:
    result = swept(lambda x: (x.sin().t().t(),), X)
    assert names(result) == ["sin"]
