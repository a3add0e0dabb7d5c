"""Names of torch's loggers are those under which it speaks."""

import importlib.util
import logging

import pytest

from memopt.torch_compat.logs import FAKE_TENSORS, WHILE_EXPORTING


@pytest.mark.parametrize("name", [FAKE_TENSORS, *(name for name in WHILE_EXPORTING if name.startswith("torch"))])
def test_a_logger_of_that_name_is_a_modules(name):
    assert importlib.util.find_spec(name) is not None, "torch logs by the names of its modules"
    assert logging.getLogger(name).name == name
