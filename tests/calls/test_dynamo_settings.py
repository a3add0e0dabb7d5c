"""What a traced model raises: its own errors and memopt's as they are, Dynamo's in a line."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.calls.dynamo_settings import dynamo_settings
from memopt.torch_compat.changing_numbers import ChangingNumbers


def traced(function, x, backend="eager"):
    torch._dynamo.reset()
    with dynamo_settings(ChangingNumbers("Model")):
        return torch.compile(function, backend=backend)(x)


def test_what_a_backend_raises_is_raised_as_it_is():
    def refuses(graph_module, example_inputs):
        raise LookupError("of the backend's own")

    with pytest.raises(LookupError, match=r"^of the backend's own$"):
        traced(lambda x: x + 1, torch.ones(2), refuses)


def test_what_a_model_raises_of_wrong_shapes_is_torchs_own_error():
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2|^a and b|must have same reduction dim") as raised:
        traced(lambda x: x @ x, torch.ones(2, 3))
    assert type(raised.value) is RuntimeError


def test_many_shapes_are_compiled_each_by_itself():
    torch._dynamo.reset()
    with dynamo_settings(ChangingNumbers("Model")):
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        assert all(torch.equal(compiled(torch.zeros(n)), torch.ones(n)) for n in range(2, 14))


def test_checkpoints_that_draw_run_without_gradients():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False).detach()

    model, x = Model(), torch.ones(3, 4)
    torch.manual_seed(0)
    found = memopt.compile(model, "1MB", backend="aten")(x)
    torch.manual_seed(0)
    assert torch.equal(found, model.inner(x))
