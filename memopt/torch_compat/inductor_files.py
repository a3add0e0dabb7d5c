"""Where Inductor keeps its files, and what it needs to make code; tried on torch 2.11 and 2.13."""

from __future__ import annotations

from torch._inductor.runtime.cache_dir_utils import default_cache_dir


def files_by_default() -> str:
    """The folder of Inductor's files where no environment variable names one."""
    return default_cache_dir()


def has_cpp_compiler() -> bool:
    """Whether Inductor finds a C++ compiler here, by whose code it computes on a CPU."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


def has_triton() -> bool:
    """Whether there is a Triton here that works, by which Inductor computes on a GPU."""
    from torch.utils import _triton

    return bool(_triton.has_triton())
