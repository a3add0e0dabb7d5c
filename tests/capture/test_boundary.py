from __future__ import annotations

from typing import Any

import pytest
import torch

from memopt.capture.boundary import at_boundary
from memopt.capture.metadata import MetadataError


def compiled(function: Any, backend: Any, *, check: bool) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=at_boundary(backend, check=check))


def test_a_function_that_returns_what_the_model_does_is_left_as_it_is() -> None:
    run = compiled(lambda x: x.t() * 2, lambda graph, inputs: graph.forward, check=True)
    x = torch.randn(2, 3)
    torch.testing.assert_close(run(x), x.t() * 2)


@pytest.mark.parametrize("check", [True, False])
def test_one_that_returns_another_type_is_refused_where_it_is_compared(check: bool) -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(value.double() for value in graph(*args))

    run = compiled(lambda x: x * 2, wrong, check=check)
    if check:
        with pytest.raises(MetadataError):
            run(torch.ones(2))
    else:
        assert run(torch.ones(2)).dtype is torch.float64
