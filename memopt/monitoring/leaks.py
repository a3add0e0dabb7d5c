"""Tensors of which each step leaves more."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Sequence

import torch

from memopt.common.garbage import python_tensors
from memopt.memory.reach import storages_of
from memopt.monitoring.groups import WEIGHTS, grouped
from memopt.monitoring.record import Leak
from memopt.monitoring.tracker import Made, Origin, Tracker

_STEPS = 3  # so many steps after the first must have left some of the same kind
_LOOKED_AT = 20  # leaks of which it is asked who holds them: each takes a look at all objects


def find_leaks(tracker: Tracker, steps: int) -> tuple[Leak, ...]:
    """Those that are there now, of most bytes first.

    No leak is what goes after some steps: a window of the last outputs, what an epoch collects.

    Args:
        tracker: knows what is there, with weights named.
        steps: how many have ended.
    """
    groups: dict[Origin, list[tuple[int, Made]]] = defaultdict(list)
    for key, made in tracker.made.items():
        if made.origin.phase not in (*WEIGHTS, "before"):
            groups[made.origin].append((key, made))
    found = []
    for origin, members in groups.items():
        later = {made.step for _, made in members if 0 < made.step < steps}
        if len(later) >= _STEPS and tracker.old_gone[origin] * 2 < len(members):
            found.append(members)
    found.sort(key=lambda members: -sum(made.nbytes for _, made in members))
    shown = _shown([members[0][0] for members in found[:_LOOKED_AT]])
    return tuple(_leak(members, shown.get(members[0][0])) for members in found)


def _leak(members: Sequence[tuple[int, Made]], shown: list[torch.Tensor] | None) -> Leak:
    (group,) = grouped(made for _, made in members)
    return Leak(group, len({made.step for _, made in members}), shown is not None and not _kept(shown))


def _shown(keys: Sequence[int]) -> dict[int, list[torch.Tensor]]:
    """By storage, the tensors of Python's that lie in it: all are gone through once."""
    shown: dict[int, list[torch.Tensor]] = {key: [] for key in keys}
    for tensor in python_tensors() if keys else ():
        for key in storages_of((tensor,)):
            if key in shown:
                shown[key].append(tensor)
    return shown


def _kept(shown: list[torch.Tensor]) -> bool:
    """Whether anything of Python's holds one of these tensors; what a graph saves may be an object, too."""
    own = (id(shown), id(sys._getframe()), id(sys._getframe(1)), id(sys._getframe(2)))
    return bool(shown) and any(id(holder) not in own for holder in gc.get_referrers(*shown))
