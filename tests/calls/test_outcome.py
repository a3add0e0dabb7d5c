"""Faults that are planted into what a compiled call leaves behind: `verify="full"` sees each, in one line."""

import collections

import pytest
import torch
from torch import nn

import memopt
from memopt.calls.model_calls import ModelCalls
from memopt.calls.verified import ModelError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


X = torch.linspace(-1, 1.5, 6 * 8).reshape(6, 8)


class Cache:
    """A plain object that a model keeps."""

    def __init__(self) -> None:
        self.count = 0


class Model(nn.Module):
    """What a model may leave behind, and heads of which a loss may use any."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.drop = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Dropout(dropout)
        self.register_buffer("total", torch.zeros(8))
        self.seen, self.stats, self.cache, self._count = [], {}, Cache(), 0
        self.recent, self.aux, self.kept = collections.deque(maxlen=3), None, None

    def forward(self, x):
        y = self.drop(self.heads[0](x)).tanh()
        self.total.add_(y.detach().sum(0))
        self.seen.append(1)
        self.stats["calls"] = self.stats.get("calls", 0) + 1
        self.recent.append(len(self.seen))
        self.cache.count += 1
        self._count += 1
        self.aux, self.kept = y.square().mean(), y
        return collections.OrderedDict(
            y=y, a=self.heads[1](x).sum(), b=self.heads[2](x).sum(), c=self.heads[3](x).sum()
        )


def on_backward(act):
    def hooked(model, outputs, x):
        outputs["y"].register_hook(lambda gradient: (act(model), gradient)[1])

    return hooked


def setting(**values):
    def act(model, outputs, x):
        for name, change in values.items():
            setattr(model, name, change(getattr(model, name)))

    return act


LEFT = {
    "list": (lambda model, outputs, x: model.seen.pop(), "seen"),
    "dictionary": (lambda model, outputs, x: model.stats.update(calls=2), "calls'] after the call is 2, not 1"),
    "queue": (lambda model, outputs, x: model.recent.append(7), "recent"),
    "object": (lambda model, outputs, x: vars(model.cache).update(count=0), "cache.count after the call is 0, not 1"),
    "private": (setting(_count=lambda count: count + 1), "_count after the call is 2, not 1"),
    "attribute's gradient": (setting(aux=torch.Tensor.detach), "aux after the call has no gradient"),
    "attribute's gradients": (setting(aux=lambda aux: 2 * aux - aux.detach()), "heads.0.weight by aux alone"),
    "attribute's memory": (setting(kept=torch.Tensor.clone), "kept and output 0 share no memory"),
    "attribute gone": (setting(aux=lambda aux: None), "aux after the call is missing"),
    "keys": (lambda model, outputs, x: outputs.update(z=outputs.pop("c")), "what is returned is"),
    "middle head": (lambda model, outputs, x: outputs.update(b=outputs["b"] + 0 * outputs["a"]), "a tensor', not None"),
    "argument trains": (lambda model, outputs, x: x.requires_grad_(), "argument 0 after the call requires a gradient"),
    "buffer trains": (setting(total=lambda total: total + 0 * model_weight(total)), "total after the call requires"),
    "parameter": (
        lambda model, outputs, x: setattr(model.heads[1], "bias", nn.Parameter(torch.zeros(8))),
        "heads.1.bias is the same tensor after the call is False, and True in the model",
    ),
    "backward draws": (on_backward(lambda model: torch.rand(1)), "backward draws random numbers"),
    "backward writes": (on_backward(lambda model: model.total.add_(1)), "total after backward"),
    "backward counts": (on_backward(lambda model: setting(_count=lambda n: n + 1)(model, None, None)), "_count after"),
}  # fmt: skip


def model_weight(like):
    return torch.ones_like(like).requires_grad_()


@pytest.mark.quick("list", "object", "attribute's gradients", "middle head", "backward writes", "keys")
@pytest.mark.parametrize("name", LEFT)
def test_what_a_call_leaves_otherwise_is_seen(name, monkeypatch):
    act, message = LEFT[name]
    real = ModelCalls._run

    def run(self, kind, steady, args, kwargs):
        outputs = real(self, kind, steady, args, kwargs)
        if self.ends.verifying:
            act(self.model, outputs, *args)
        return outputs

    monkeypatch.setattr(ModelCalls, "_run", run)
    with pytest.raises(ModelError, match="emitted code") as error:
        memopt.compile(Model(), backend="aten", verify="full")(X.clone())
    assert message in str(error.value) and "\n" not in str(error.value)
