"""Kernels that a copy of the process does not compile."""

import subprocess
import sys

from torch._inductor import async_compile

from memopt.torch_compat.kernel_pool import compile_kernels


def test_a_pool_that_has_not_started_begins_with_nothing(monkeypatch):
    begun = []
    monkeypatch.setattr(async_compile.AsyncCompile, "triton", lambda self, *given: begun.append(given))
    monkeypatch.setattr(async_compile.AsyncCompile, "use_process_pool", classmethod(lambda cls: False))
    assert not compile_kernels([("name", "source", "cuda")]) and not begun
    monkeypatch.setattr(async_compile.AsyncCompile, "use_process_pool", classmethod(lambda cls: True))
    assert compile_kernels([("name", "source", "cuda")]) and begun == [("name", "source", "cuda")]


HANDED = """
from torch._inductor.async_compile import AsyncCompile
from memopt.torch_compat.kernel_pool import hand_over

told = []
hand_over(told.append)
compiler = AsyncCompile()
compiler.triton("name", "source", "cuda")
assert AsyncCompile.use_process_pool() and told == [("name", "source", "cuda")], told
"""


def test_kernels_are_told_in_place_of_compiled():
    subprocess.run([sys.executable, "-c", HANDED], check=True)
