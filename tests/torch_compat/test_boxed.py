from __future__ import annotations

from typing import Any

import torch

from memopt.torch_compat.aot_autograd import aot_autograd
from memopt.torch_compat.boxed import boxed


def test_what_is_marked_is_given_a_list_that_it_may_empty() -> None:
    given: list[Any] = []

    def compiler(module: Any, inputs: Any) -> Any:
        def run(args: list[Any]) -> Any:
            given.append(type(args))
            values = list(args)
            args.clear()
            return module(*values)

        assert boxed(run) is run
        return run

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend=aot_autograd(fw_compiler=compiler))
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert given == [list]
