"""What people wrap in torch.utils.checkpoint, found in any model."""

import pytest
import torch

import memopt
from memopt.comparison.blocks import blocks_of, checkpoint_blocks
from tests.end_to_end import build, gradients, step


@pytest.mark.parametrize(
    ("name", "count", "kind"),
    [
        ("gpt2:tiny", 2, "Block"),
        ("bert_base:tiny", 2, "Layer"),
        ("resnet18:tiny", 5, "BasicBlock"),
        ("densenet121:tiny", 6, "DenseLayer"),
    ],
)
def test_blocks_of_known_models(name, count, kind):
    model = memopt.models.build(name)
    found = blocks_of(model)
    assert len(found) == count
    assert {type(model.get_submodule(name)).__name__ for name in found} == {kind}


def test_containers_count_where_nothing_else_repeats():
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) for _ in range(3)])
    assert blocks_of(model) == ["0", "1", "2"]


def test_the_step_is_the_same_and_takes_less_memory():
    model, inputs = build("gpt2")
    expected = step(model, inputs)
    reference = gradients(model)
    model.zero_grad()
    before = memopt.measure(step, model, inputs).peak_bytes
    model.zero_grad()
    names = checkpoint_blocks(model)
    torch.testing.assert_close(step(model, inputs), expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(model), reference, rtol=0, atol=0)
    model.zero_grad()
    assert memopt.measure(step, model, inputs).peak_bytes < before
    assert names == blocks_of(model)


def test_a_list_that_grows_after_the_call_is_kept_as_it_was():
    model, inputs = build("densenet121")
    expected = step(model, inputs)
    reference = gradients(model)
    model.zero_grad()
    checkpoint_blocks(model)
    torch.testing.assert_close(step(model, inputs), expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(model), reference, rtol=0, atol=0)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="no repeated blocks"):
        checkpoint_blocks(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
