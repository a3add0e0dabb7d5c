"""What a model logs, warns of or prints ends no graph, and is written at each call."""

import logging
import warnings

import pytest
import torch
from torch import nn

import memopt
from memopt.torch_compat.logging_calls import deferred_logging

log = logging.getLogger(__name__)


class Talking(nn.Module):
    def __init__(self, say):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.say = say

    def forward(self, x):
        hidden = self.linear(x)
        self.say(self, hidden)
        return torch.relu(hidden)


def _within(say):
    def outer(model, hidden):
        say(model, hidden)

    return outer


SAYINGS = {
    "print": lambda model, hidden: print("said", hidden.shape[0], end="", flush=True),
    "print a tensor": lambda model, hidden: print("said", hidden.mean()),
    "print a list": lambda model, hidden: print("said", [hidden.sum(), 1], {"a": hidden}, model),
    "in a function": _within(lambda model, hidden: print("said", f"{hidden.mean()}")),
}
LOGGED = {
    "constant": lambda model, hidden: log.warning("said %d", hidden.shape[0]),
    "tensor": lambda model, hidden: log.warning("said %s", hidden.mean()),
    "formatted": lambda model, hidden: log.warning(f"said {hidden.mean()}"),
    "keywords": lambda model, hidden: log.warning("said", extra={"step": 1}, stacklevel=2),
    "log": lambda model, hidden: log.log(logging.WARNING, "said"),
    "guarded": lambda model, hidden: log.warning("said") if log.isEnabledFor(logging.WARNING) else None,
    "of the module": lambda model, hidden: logging.warning("said"),
    "in a function": _within(lambda model, hidden: log.warning("said")),
}


def _graphs_of(model, x):
    torch._dynamo.reset()
    graphs = []

    def backend(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    compiled = torch.compile(model, backend=backend)
    with deferred_logging():
        for _ in range(2):
            assert torch.equal(compiled(x), torch.relu(model.linear(x)))
    return len(graphs)


@pytest.mark.parametrize("name", SAYINGS)
def test_what_is_printed_ends_no_graph_and_comes_at_each_call(name, capsys):
    assert _graphs_of(Talking(SAYINGS[name]), torch.randn(4, 8)) == 1
    assert capsys.readouterr().out.count("said") == 2


@pytest.mark.parametrize("name", LOGGED)
def test_what_is_logged_ends_no_graph_and_comes_at_each_call(name, caplog):
    assert _graphs_of(Talking(LOGGED[name]), torch.randn(4, 8)) == 1
    assert [record.getMessage()[:4] for record in caplog.records] == ["said", "said"]


@pytest.mark.parametrize("more", [(), (FutureWarning,), (FutureWarning, 2)])
def test_a_warning_names_the_line_of_the_model(more):
    model = Talking(lambda model, hidden: warnings.warn("said", *more))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _graphs_of(model, torch.randn(4, 8)) == 1
    said = [warning for warning in caught if str(warning.message) == "said"]
    assert len(said) == 2
    assert {warning.filename for warning in said} == {__file__}
    assert {warning.category for warning in said} == {more[0] if more else UserWarning}


def test_elsewhere_tracing_is_as_ever():
    model = Talking(SAYINGS["print"])
    with deferred_logging():
        pass
    assert torch._dynamo.explain(model)(torch.randn(4, 8)).graph_count == 2


@pytest.mark.quick("1GB-True", "None-False")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("budget", [None, 1.0, "1GB"])
def test_a_model_that_talks_is_one_graph_and_says_nothing_in_a_rehearsal(budget, train, capsys, caplog):
    torch._dynamo.reset()

    def say(model, hidden):
        print("said", hidden.mean())
        log.warning("said %d", hidden.shape[0])

    model = Talking(say).train(train)
    compiled = memopt.compile(model, budget, backend="aten")
    x = torch.randn(4, 8)
    with torch.set_grad_enabled(train):
        for _ in range(2):
            loss = compiled(x).sum()
            if train:
                loss.backward()
                model.zero_grad()
    assert compiled.report.notes == ()
    assert capsys.readouterr().out.count("said") == 2
    assert len([record for record in caplog.records if record.name == __name__]) == 2
