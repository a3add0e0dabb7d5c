"""GPT-2: what a token sees, tied weights, how residual branches begin, and its bounds."""

import pytest
import torch

from memopt import models
from memopt.models.gpt2 import GPT2


def tiny(**options):
    torch.manual_seed(0)
    return GPT2(2, 32, 4, vocabulary=64, positions=16, **options).eval()


def test_a_token_sees_those_before_it_alone():
    model, tokens = tiny(), torch.randint(64, (2, 12))
    before = model(tokens)
    tokens[:, 7] = (tokens[:, 7] + 1) % 64
    after = model(tokens)
    assert before.shape == (2, 12, 64)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7:], before[:, 7:])


def test_the_head_is_the_embedding():
    model = tiny()
    assert model.head.weight is model.tokens.weight
    assert len(list(model.parameters())) == len({id(parameter) for parameter in model.parameters()})


def test_layers_that_end_a_residual_branch_begin_smaller():
    model = tiny()
    for block in model.blocks:
        assert block.expand.weight.std().item() == pytest.approx(0.02, rel=0.1)
        for layer in (block.projection, block.attention.projection):
            assert layer.weight.std().item() == pytest.approx(0.02 / 2, rel=0.1)  # of four branches


def test_labels_that_are_ignored_leave_the_loss_of_the_others():
    model, tokens = tiny(), torch.randint(64, (2, 8))
    labels = tokens.clone()
    labels[:, 5:] = -100
    torch.testing.assert_close(model(tokens, labels), model(tokens[:, :5], tokens[:, :5]))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="heads 5 must divide width 32"):
        GPT2(2, 32, 5)
    with pytest.raises(ValueError, match="17"):
        tiny()(torch.zeros(1, 17, dtype=torch.int64))


def test_the_smallest_has_124_million_parameters():
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in models.build("gpt2").parameters()) == 124_439_808
