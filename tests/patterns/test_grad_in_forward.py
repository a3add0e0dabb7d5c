"""Which gradients of a loss's rows can be computed with the loss: those that its own gradient multiplies."""

import pytest
import torch

from memopt.patterns.grad_in_forward import grad_in_forward
from memopt.patterns.rows import find_rows, products_before_losses
from memopt.program import InputKind
from tests.passes.build import capture_joint
from tests.passes.test_chunk_loss import FORMS, LOSSES, data


def found(loss, dtype=torch.float32, form="decomposed"):
    """The program of a loss, and how its gradients are computed in forward."""
    program = capture_joint(loss, *data(dtype), decompositions=FORMS[form])
    (product,) = products_before_losses(program)
    return program, grad_in_forward(program, find_rows(program, product))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mean", "sum", "tokens", "capped", "scaled"])
def test_what_one_number_multiplies_is_computed_with_the_loss(name, form):
    program, ahead = found(LOSSES[name], form=form)
    assert ahead is not None and program.input_of(ahead.tangent.name).kind is InputKind.TANGENT
    assert ahead.scaled and not ahead.tangent.meta["val"].ndim


def test_rows_with_gradients_of_their_own_wait_for_backward():
    assert found(LOSSES["none"])[1] is None


def test_in_float16_a_scale_comes_too_late():
    assert found(LOSSES["mean"], torch.bfloat16)[1] is not None
    assert found(LOSSES["mean"], torch.float16)[1] is None
