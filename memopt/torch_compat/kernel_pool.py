"""The processes in which Inductor compiles kernels of Triton's; tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor import async_compile


def hand_over(tell: Callable[[tuple[Any, ...]], None]) -> None:
    """From now on in this process, kernels are not compiled: `tell` gets each, as `compile_kernels` takes it."""

    def triton(_: Any, *arguments: Any) -> None:
        tell(arguments)

    async_compile.AsyncCompile.use_process_pool = classmethod(lambda cls: True)  # type: ignore[method-assign,assignment]
    async_compile.AsyncCompile.triton = triton  # type: ignore[method-assign,assignment]


def compile_kernels(kernels: list[tuple[Any, ...]]) -> bool:
    """Have the pool begin with these kernels, where Inductor finds them later; False if it has not started yet."""
    if not async_compile.AsyncCompile.use_process_pool():  # type: ignore[no-untyped-call]
        return False
    compiler = async_compile.AsyncCompile()
    for arguments in kernels:
        compiler.triton(*arguments)
    return True
