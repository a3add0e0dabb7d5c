"""Which line of the user's runs: the innermost that is neither torch's nor memopt's."""

from __future__ import annotations

import linecache
import os
import types

import torch

from memopt.common.own_files import MEMOPT
from memopt.torch_compat.source_files import TORCH

_OURS = (TORCH, MEMOPT)
_MODELS = MEMOPT + "models" + os.sep  # are as a user's
# By number, as hashing code is slow: the code, which keeps its number while it is here, and whether it is a user's.
_known: dict[int, tuple[types.CodeType, bool]] = {}

Place = tuple[str, int]  # file and line
NOWHERE: Place = ("", 0)


def place_of_error(error: BaseException) -> Place:
    """The innermost place of the user's that an error went through."""
    trace, found = error.__traceback__, NOWHERE
    while trace is not None:
        if is_users(trace.tb_frame.f_code):
            found = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return found


def in_backward(error: BaseException) -> bool:
    """Whether an error went through a backward pass."""
    trace, passes = error.__traceback__, (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
    while trace is not None and trace.tb_frame.f_code not in passes:
        trace = trace.tb_next
    return trace is not None


def said(place: Place) -> str:
    """`file:line, code`; empty for none."""
    file, line = place
    if not file:
        return ""
    code = linecache.getline(file, line).strip()
    return f"{file}:{line}, {code}" if code else f"{file}:{line}"


def is_users(code: types.CodeType) -> bool:
    """Whether code is a user's: neither torch's, nor memopt's, nor made as it runs."""
    found = _known.get(id(code))
    if found is None:
        file = code.co_filename
        ours = os.path.abspath(file).startswith(_OURS) and not file.startswith(_MODELS)
        found = _known[id(code)] = code, not ours and not file.startswith("<")
    return found[1]
