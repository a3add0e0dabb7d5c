"""Branches on `torch.rand` whose outcome is fixed: a number of [0, 1) that is compared with one outside of it.

`torch.rand([]) < layerdrop` is never true where `layerdrop` is 0. Dynamo breaks the graph at each such branch, as it is
on the value of a tensor. Here it is taken as what it always is; the number is drawn all the same. That the other number
is what it was is one of Dynamo's guards. Tried on torch 2.13.
"""

from __future__ import annotations

import contextlib
import dis
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import ConstantVariable, TensorVariable

from memopt.common.scoped import Hook

_EXACT = (torch.float32, torch.float64)  # narrower ones may round up to 1
_DRAWS = (torch.rand, torch.rand_like)
_MIRRORED = {operator.lt: operator.gt, operator.gt: operator.lt, operator.le: operator.ge, operator.ge: operator.le}
_METHODS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_FUNCTIONS = {getattr(torch, name): compared for name, compared in _METHODS.items()}


def fixed_comparisons() -> contextlib.AbstractContextManager[None]:
    """Within: such branches break no graph. Elsewhere, and in other threads, tracing is as ever."""
    return _hook.within()


def outcome(node: torch.fx.Node) -> bool | None:
    """What a comparison in Dynamo's graph always is; None where it is another node, or goes by what is drawn."""
    target: Any = node.target
    compared = _METHODS.get(target) if isinstance(target, str) else _FUNCTIONS.get(target, target)
    if compared not in _MIRRORED or len(node.args) != 2 or node.kwargs:
        return None
    drawn, number = node.args
    if isinstance(number, torch.fx.Node):
        compared, drawn, number = _MIRRORED[compared], number, drawn
    if not isinstance(drawn, torch.fx.Node) or type(number) not in (int, float):
        return None
    if drawn.target not in _DRAWS or drawn.kwargs.get("out") is not None:
        return None
    if getattr(drawn.meta.get("example_value"), "dtype", None) not in _EXACT:
        return None
    # What is drawn is 0 or more, and less than 1.
    fixed: Any = number
    least, most = compared(0.0, fixed), compared(1.0, fixed)
    strict = compared in (operator.lt, operator.ge)
    return bool(least) if least == most or (strict and number == 1) else None


@Hook
def _hook() -> None:
    """Look at what each branch is on, once in a process."""
    jumps = [number for name, number in dis.opmap.items() if "JUMP" in name and "_IF_" in name and "NONE" not in name]
    for kind in _kinds(symbolic_convert.InstructionTranslatorBase):
        table = kind.dispatch_table
        for number in jumps:
            table[number] = _asked_first(table[number])


def _kinds(kind: Any) -> list[Any]:
    return [kind, *(further for each in kind.__subclasses__() for further in _kinds(each))]


def _asked_first(jump: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def asked(tx: Any, instruction: Any) -> None:
        if _hook.in_force and tx.stack and isinstance(tx.stack[-1], TensorVariable):
            value = tx.stack[-1].as_proxy().node
            found = outcome(value)
            if found is not None:
                tx.pop()
                tx.push(ConstantVariable.create(found))
        jump(tx, instruction)

    return asked
