from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from memopt.torch_compat import guarded_code


def test_what_was_compiled_of_a_function_is_found_with_its_guards() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    torch._dynamo.reset()
    assert guarded_code.entries_of(function.__code__) == []
    compiled = torch.compile(function, backend="eager")
    compiled(torch.ones(2))
    (entry,) = guarded_code.entries_of(function.__code__)
    assert entry.guard_manager.check({"x": torch.ones(2)}) and not entry.guard_manager.check({"x": torch.ones(2, 2)})
    assert guarded_code.innermost(compiled) is function


def test_what_is_in_force_is_noticed() -> None:
    seen: list[bool] = []

    def look(x: Any) -> Any:
        seen.append(guarded_code.nothing_in_force())
        return x * 1

    look(torch.ones(1))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(1))
    make_fx(look)(torch.ones(1))
    with torch.compiler.set_stance("force_eager"):
        look(torch.ones(1))
    look(torch.ones(1))
    assert seen == [True, False, False, False, True]
