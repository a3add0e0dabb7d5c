"""A model's own errors, told from what it raises on fake tensors alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.calls.own_errors import OwnErrors

X = torch.ones(4, 8)


class OnFakes(nn.Module):
    """Raises on fake tensors, or where a row is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.again = nn.Linear(8, 8), nn.Linear(8, 64)
        self.ran: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if x.shape[0] == 3:
            raise LookupError("three")
        if type(x) is not torch.Tensor and not torch.compiler.is_compiling():
            raise ValueError("of fakes")
        if not torch.compiler.is_compiling():
            y = self.again(y)
            self.ran.append(1)
        return y


def test_what_the_model_does_not_raise_itself_is_not_its_own() -> None:
    model = OnFakes()
    own = OwnErrors(model)
    assert "of fakes" in str(own.on_fakes((X,), {}))
    assert own.raise_own((X,), {}, 10**6) is None
    assert not model.ran  # it goes no further than the fakes did


def test_what_the_model_raises_itself_is_raised_where_it_may_run() -> None:
    own = OwnErrors(OnFakes())
    with pytest.raises(LookupError, match="three"):
        own.raise_own((X[:3],), {}, 10**6)


def test_what_is_not_known_is_said() -> None:
    model = OnFakes()
    for x, words in ((X, "of fakes"), (X[:3], "three")):
        assert words in str(OwnErrors(model).raise_own((x,), {}, 100))
    assert not model.ran


def test_a_share_of_no_step_yet_is_no_limit_to_a_call_that_fails() -> None:
    model = OnFakes()
    assert OwnErrors(model).raise_own((X,), {}, None) is None
    with pytest.raises(LookupError, match="three"):
        OwnErrors(model).raise_own((X[:3],), {}, None)
    assert not model.ran


def failing(*_: Any, **__: Any) -> None:
    raise KeyError("planted")


@pytest.mark.parametrize(
    ("budget", "said"), [("1MB", "planted"), (0.7, "planted"), ("2.8kB", "on fake tensors it raises ValueError: of f")]
)
def test_a_refusal_does_not_say_that_it_is_the_models(
    budget: str | float, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("memopt.compilation.session.Session.plan_training", failing)
    torch._dynamo.reset()
    run = memopt.compile(OnFakes(), budget, backend="aten")
    for _ in range(2):
        with pytest.raises(memopt.CaptureError, match=said) as caught:
            run(X)
        assert str(caught.value).startswith("OnFakes cannot be held to a budget: ")
