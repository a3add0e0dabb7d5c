"""Whose line it is: the innermost that is neither torch's nor memopt's."""

import pytest
import torch

from memopt import models
from memopt.monitoring.lines import NOWHERE, is_users, place_of_error, said


def test_torch_s_and_memopt_s_code_is_not_the_user_s_but_models_are():
    assert is_users(test_torch_s_and_memopt_s_code_is_not_the_user_s_but_models_are.__code__)
    assert not is_users(torch.nn.Linear.forward.__code__)
    assert not is_users(is_users.__code__)
    assert not is_users(compile("1", "<string>", "eval"))
    assert is_users(type(models.build("gpt2", tiny=True)).forward.__code__)


def test_an_error_of_torch_s_is_told_of_the_line_that_called_it():
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 2)(torch.ones(1, 3))
    place = place_of_error(caught.value)
    assert said(place).startswith(__file__) and said(place).endswith(", torch.nn.Linear(2, 2)(torch.ones(1, 3))")
    assert place_of_error(RuntimeError()) == NOWHERE and said(NOWHERE) == ""
    assert said(("gone.py", 3)) == "gone.py:3"
