import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def _compiler():
    """For tests of Inductor's code on the CPU: they are skipped where nothing compiles it."""
    from memopt.backends.inductor import missing_compiler

    reason = missing_compiler(torch.device("cpu"))
    if reason is not None:
        pytest.skip(reason)
