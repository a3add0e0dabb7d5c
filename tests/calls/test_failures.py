"""Errors from inside memopt are told from a model's own, and from refusals."""

import pytest
import torch

from memopt.backends.aten import AtenBackend
from memopt.calls.failures import failure_of
from memopt.calls.sessions import Sessions
from memopt.capture.export import CaptureError
from memopt.memory.addresses import addresses
from memopt.options import Options


@pytest.fixture
def options():
    return Options(budget=None, optimizer=None, passes=None, verify=True, engine=AtenBackend())


def raised(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_an_error_of_a_room_is_a_failure_with_its_traceback(options):
    failure = failure_of(raised(lambda: addresses(None)), options)
    assert failure.line.startswith("AttributeError") and "addresses.py" in failure.trace


def test_an_error_of_the_model_is_the_users_though_frames_of_calls_lie_around(options):
    def model():
        raise AttributeError("of the model")

    assert failure_of(raised(model), options) is None
    assert failure_of(raised(lambda: Sessions.of(None, None)), options) is None  # a frame around every call


def test_a_refusal_is_for_the_user(options):
    assert failure_of(CaptureError("in a line"), options) is None


def test_on_a_torch_that_was_not_tried_the_line_names_those_that_were(options, monkeypatch, own_caches):
    failure = failure_of(raised(lambda: addresses(None)), options)
    assert failure.save("Model", options).endswith(".txt")
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    assert failure.save("Model", options).endswith("memopt was tried on (2.11, 2.13, 2.14; this is 2.99.0+cpu)")
