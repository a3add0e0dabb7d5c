"""Functions that an error came through, traced by Dynamo again in later calls.

Dynamo leaves a function alone for good, of every model of that class, where it could not be traced once. A call that a
model refuses (a batch of a wrong width) cannot be: with it all later sizes and models of the process would run as they
are, or be refused. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Iterator
from typing import Any

from torch._C._dynamo import eval_frame
from torch._dynamo import external_utils

from memopt.common.own_files import MEMOPT
from memopt.torch_compat.source_files import COMPILER

# Of these the frames are none of a model's, but for one that Dynamo puts around modules of torch's.
_OWN = (MEMOPT, *COMPILER)
_AROUND = str(external_utils.__file__)


def trace_again(error: BaseException) -> None:
    """Have Dynamo trace what this error came through when it is called next."""
    compiled: Any = eval_frame
    as_ever = compiled._FrameExecStrategy(compiled._FrameAction.DEFAULT, compiled._FrameAction.DEFAULT)
    for code in set(_codes_of(error)):
        compiled.set_code_exec_strategy(code, as_ever)


def _codes_of(error: BaseException) -> Iterator[types.CodeType]:
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        each = chain.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        chain += [each.__cause__, each.__context__]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            file = frame.f_code.co_filename
            if file == _AROUND or not file.startswith(_OWN):
                yield frame.f_code
