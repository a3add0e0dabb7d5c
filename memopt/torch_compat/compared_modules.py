"""Modules that a model's code compares with one another: a graph holds for these modules only.

`layer is self.last` has no guard of Dynamo's. Where it compiles a method by itself, called for one layer after another
since a loop around it breaks the graph, code of one layer ran for others. Tried on torch 2.13.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import UnspecializedNNModuleVariable

from memopt.common.scoped import Hook


def compared_modules_guarded() -> contextlib.AbstractContextManager[None]:
    """Within: a graph whose code has compared modules is run for the same ones only."""
    return _hook.within()


@Hook
def _hook() -> None:
    """Look at what is compared, once in a process."""
    kinds: list[Any] = [symbolic_convert.InstructionTranslatorBase]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name in ("IS_OP", "COMPARE_OP", "CONTAINS_OP"):
            number = dis.opmap[name]
            kind.dispatch_table[number] = _guarded(kind.dispatch_table[number], name)


def _guarded(compare: Callable[[Any, Any], None], name: str) -> Callable[[Any, Any], None]:
    def guarded(tx: Any, instruction: Any) -> None:
        if _hook.in_force and len(tx.stack) > 1:
            modules = [each for each in tx.stack[-2:] if isinstance(each, UnspecializedNNModuleVariable)]
            if len(modules) == 2 or (modules and name == "CONTAINS_OP"):
                for module in modules:
                    if module.source is not None:
                        install_guard(module.source.make_guard(GuardBuilder.ID_MATCH))
        compare(tx, instruction)

    return guarded
