"""BERT: its head is the embedding of tokens, and example labels are of masked tokens alone."""

import pytest
import torch

from memopt.models.base import IGNORED
from memopt.models.bert import BertForMaskedLM


def tiny(**options):
    torch.manual_seed(0)
    return BertForMaskedLM(2, 32, 4, 64, vocabulary=50, positions=16, mask_token=3, **options).eval()


def test_the_head_is_the_embedding_of_tokens():
    model = tiny()
    assert model.head.weight is model.encoder.tokens.weight
    assert model(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 7, 50)


def test_labels_are_what_was_masked_and_nothing_else():
    model, tokens = tiny(), torch.randint(4, 50, (8, 16))
    inputs = model.training_inputs(tokens)
    masked = inputs["labels"] != IGNORED
    assert masked[:, 0].all() and masked.sum() < masked.numel() / 2
    assert torch.equal(inputs["labels"][masked], tokens[masked]) and (inputs["input_ids"][masked] == 3).all()
    assert torch.equal(inputs["input_ids"][~masked], tokens[~masked])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="mask_token 103 is not in a vocabulary of 50"):
        BertForMaskedLM(1, 32, 4, 64, vocabulary=50)
    with pytest.raises(ValueError):
        BertForMaskedLM(1, 32, 5, 64)
