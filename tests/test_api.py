"""The calls' own part: arguments made definite, and what is refused before anything is captured."""

import pytest
import torch
from torch import nn

import memopt
from memopt.api import call_arguments, device_of, make_options
from memopt.backends.aten import AtenBackend
from memopt.backends.static import StaticBackend
from memopt.memory.cost.devices import find
from memopt.memory.optimizer import OptimizerFootprint
from tests.end_to_end import build
from tests.support import in_one_line

CPU = torch.device("cpu")


# -- example inputs and devices ---------------------------------------------------------------------------------------


def test_example_inputs_are_positions_keywords_or_one_tensor():
    x = torch.ones(2)
    assert call_arguments((x, 1)) == ((x, 1), {}) and call_arguments([x]) == ((x,), {})
    assert call_arguments({"x": x}) == ((), {"x": x}) and call_arguments(()) == ((), {})
    assert call_arguments(x)[0][0] is x and call_arguments(None) == ((None,), {})


def test_keywords_are_copied():
    given = {"x": 1}
    call_arguments(given)[1]["y"] = 2
    assert given == {"x": 1}


def test_the_device_of_a_model_is_that_of_its_first_tensor():
    assert device_of(nn.ReLU()) == CPU
    assert device_of(nn.Linear(2, 2, device="meta")).type == "meta"
    only_buffers = nn.BatchNorm1d(2, affine=False, device="meta")
    assert device_of(only_buffers).type == "meta"


# -- options ----------------------------------------------------------------------------------------------------------


def test_what_was_asked_for_is_made_definite():
    optimizer, passes = torch.optim.SGD([torch.ones(1)], lr=0.1), [memopt.INFERENCE[0]]
    options = make_options(
        budget="2MB", optimizer=optimizer, backend="static", passes=iter(passes), allow=["freeze"], device=CPU
    )
    assert options.budget.bytes == 2_000_000 and options.optimizer is optimizer and options.verify is True
    assert isinstance(options.engine, StaticBackend) and options.notes == () and options.target is None
    assert options.passes == tuple(passes) and options.allow == ("freeze",)
    engine = AtenBackend()
    plain = make_options(backend=engine, device=CPU)
    assert plain.engine is engine and plain.passes is None and plain.budget is None and plain.allow == ()
    assert make_options(backend=engine, passes=(), device=CPU).passes == ()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"allow": "freeze"}, ValueError, r"^allow takes names in a tuple: allow=\('freeze',\)$"),
        ({"allow": ("freeze", "bf16")}, ValueError, r"^allow: unknown lever 'bf16' \(known: freeze\)$"),
        ({"verify": None}, ValueError, "verify is None"),
        ({"passes": memopt.INFERENCE[0]}, TypeError, r"passes takes a tuple: passes="),
        ({"optimizer": "adam"}, TypeError, "^optimizer takes one optimizer, a list .*, not str$"),
        ({"passes": (memopt.INFERENCE[0], type(memopt.INFERENCE[0]))}, TypeError, "passes must hold memopt.Pass"),
        ({"budget": "2 things"}, ValueError, "budget"),
        ({"backend": ""}, ValueError, "unknown backend ''"),
        ({"backend": AtenBackend}, ValueError, "unknown backend <class"),
        ({"backend": "tensorflow", "budget": "1GB"}, ValueError, "keeps no budget"),
    ],
)
def test_what_is_not_understood(options, error, match):
    in_one_line(error, match, make_options, **{"backend": "aten", **options}, device=CPU)


def test_without_a_compiler_another_engine_runs_and_a_note_says_so(monkeypatch):
    monkeypatch.setattr("memopt.backends.inductor.missing_compiler", lambda device: "no compiler")
    asked = make_options(backend="inductor", device=CPU)
    assert type(asked.engine) is AtenBackend and asked.notes == ('no compiler: backend "aten" is used instead',)
    chosen = make_options(device=CPU)
    assert type(chosen.engine) is not AtenBackend and isinstance(chosen.engine, AtenBackend)
    assert chosen.notes == asked.notes


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_under_a_budget_onnx_runtime_shares_the_weights(budget):
    pytest.importorskip("onnxruntime")
    settings = make_options(backend="onnxruntime", budget=budget, device=CPU).engine._settings
    assert (settings.tight, settings.limit) == ((False, None) if budget is None else (True, 10**9))


def test_the_optimizer_is_counted_for_the_device_that_is_planned_for():
    model = nn.Linear(3, 5)
    options = make_options(backend="aten", optimizer=torch.optim.Adam(model.parameters()), device=CPU)
    assert options.place is None and isinstance(options.counted(list(model.parameters())).footprint, OptimizerFootprint)
    assert make_options(backend="aten", device=CPU).counted(list(model.parameters())) is None


# -- plan and estimate ------------------------------------------------------------------------------------------------


def test_a_plan_for_a_device_that_is_not_here():
    model, x = nn.Linear(64, 64).eval(), torch.ones(8, 64)
    report = memopt.plan(model, x, device="h100")
    assert report.peak_bytes % 512 == 0 and model.weight.device == CPU
    assert memopt.plan(model, x).peak_bytes < report.peak_bytes


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "h1000"}, "h100"),
        ({"device": "h100", "verify": True}, "cannot be verified"),
        ({"device": "h100", "backend": "static"}, "one of backend \"aten\", not 'static'"),
        ({"device": ""}, "device"),
    ],
)
def test_a_plan_that_cannot_be_made(options, match):
    in_one_line(ValueError, match, memopt.plan, nn.Linear(2, 2).eval(), torch.ones(1, 2), **options)


def test_a_plan_beyond_the_memory_of_its_device_says_so():
    memory = find("rtx4090").memory_bytes
    with torch.device("meta"):
        model = nn.Linear(1 << 17, 1 << 16).eval()
    report = memopt.plan(model, torch.empty(1, 1 << 17, device="meta"), device="rtx4090")
    assert report.peak_bytes > memory and "are more than the" in report.notes[-1] and "4090" in report.notes[-1]


def test_an_estimate_has_backward_in_training_mode_alone():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)), torch.ones(16, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters())
    training = memopt.estimate(model.train(), x, optimizer)
    inference = memopt.estimate(model.eval(), x)
    assert training.gradients and training.optimizer_state and not inference.gradients
    assert inference.parameters == training.parameters and inference.total < training.total
    assert not optimizer.state and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- estimates ---------------------------------------------------------------------------------------------------


def test_an_estimate_adds_up_and_points_into_the_source():
    model, inputs = build("resnet18")
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    found = memopt.estimate(model, inputs, optimizer)
    parts = ("parameters", "buffers", "gradients", "optimizer_state", "inputs", "activations", "workspace")
    assert found.total == sum(getattr(found, part) for part in parts)
    assert all(getattr(found, part) >= 0 for part in parts)
    assert found.parameters == parameters
    assert found.buffers == sum(b.numel() * b.element_size() for b in model.buffers())
    assert found.inputs == sum(t.numel() * t.element_size() for t in inputs.values())
    # Two moments per parameter, and a float32 step count each.
    assert found.optimizer_state == 2 * parameters + 4 * len(list(model.parameters()))
    assert not optimizer.state
    assert len(found.largest) == 10
    sizes = [tensor.bytes for tensor in found.largest]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) <= found.total
    assert all(".py:" in tensor.source for tensor in found.largest)
    assert "largest tensors at the peak" in str(found)
    inference = memopt.estimate(model.eval(), {"images": inputs["images"]})
    assert inference.gradients == inference.optimizer_state == 0
    assert inference.total < found.total
