"""Deques of limited length (`maxlen`), which Dynamo takes for ones without: of a full one, nothing was dropped.

Tried on 2.13.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from typing import Any

from torch._dynamo.variables import ConstantVariable, lists

from memopt.common.scoped import Hook


def bounded_deques() -> contextlib.AbstractContextManager[None]:
    """Within: a deque that was there before drops what its length leaves no place for, in the trace as well.

    Elsewhere, and in other threads, tracing is as ever.
    """
    return _hook.within()


class _Length(ConstantVariable):
    """A deque's greatest length.

    What Dynamo writes to a deque in the end is all that it holds then, which a limit does not change: it need not
    refuse that, as it does where it knows of one.
    """

    def is_constant_none(self) -> bool:
        """Whether there is no limit, as far as is asked before the deque is written to."""
        return True


@Hook
def _hook() -> None:
    """Look at each list that Dynamo reads, once in a process."""
    kind: Any = lists.BaseListVariable
    plain = kind.cls_for_instance

    def cls_for_instance(obj: Any) -> Any:
        if _hook.in_force and type(obj) is collections.deque and obj.maxlen is not None:
            return functools.partial(plain(obj), maxlen=_Length(obj.maxlen))
        return plain(obj)

    kind.cls_for_instance = staticmethod(cls_for_instance)
