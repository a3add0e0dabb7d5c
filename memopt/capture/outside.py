"""What of a model's call ran operator by operator, outside of the graphs that were captured: it is not planned for.

Dynamo says where it breaks a graph, and which functions it gives up. In training autograd's graph says the rest: what
is neither a compiled function nor a view in it was run eagerly, and may keep activations.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

from memopt.common.own_files import MEMOPT
from memopt.torch_compat.autograd_nodes import first_nodes
from memopt.torch_compat.dynamo import ENTRY_FILE, compilations

_MOST = 3  # places, and kinds of operations, that are named

OUTSIDE = "parts run outside of captured graphs: "

# The latest compilation before a call, and the nodes of autograd's graph that its arguments came from.
Mark = tuple[Any, frozenset[Any]]

# Nodes of autograd's graph that hold nothing of their own, as views; and what is compiled.
_NOTHING = re.compile(
    "Alias|AsStrided|CopyBackwards|CopySlices|Detach|Diagonal|Expand|Permute|ReshapeAlias|Select|Slice|Split|"
    "SplitWithSizes|Squeeze|T|Transpose|Unbind|Unfold|UnsafeSplit|UnsafeSplitWithSizes|UnsafeView|Unsqueeze|View|"
    "ViewAsComplex|ViewAsReal|_DDPSink|RegisterPostBackwardFunction|CompiledFunction|_Relay|_Refusal|torch::autograd::.*"
)

# A function: its name, file and first line.
_Function = tuple[str, str, int]


class Outside:
    """What was seen of one model's calls.

    Attributes:
        rehearsed: as `line_of_all`, of the call that was rehearsed last.
    """

    def __init__(self) -> None:
        """Nothing is compiled yet."""
        self.rehearsed = ""
        self._breaks: dict[str, str] = {}  # where graphs end, in order, and why
        self._ends: set[tuple[str, int]] = set()  # file and line where a graph has ended with its function
        self._given_up: dict[_Function, str] = {}  # by Dynamo, which says so once: where, and why

    def saw(self, graph_module: fx.GraphModule) -> None:
        """Remember where a graph of Dynamo's ends, if not with its function."""
        reason = getattr(graph_module, "compile_subgraph_reason", None)
        if reason is not None and not reason.graph_break:
            self._ends.update((frame.filename, frame.lineno or 0) for frame in reason.user_stack[-1:])
        if reason is None or not reason.graph_break or reason.reason.startswith("generic_jump"):
            return  # a jump by a tensor's value computes nothing
        why = "" if reason.reason.startswith("step_unsupported") else f" ({reason.reason.splitlines()[0]})"
        # What stands for functions of torch's is no place of the user's.
        own = [frame for frame in reason.user_stack if not frame.filename.startswith(MEMOPT)]
        frame = own[-1] if own else None
        where = "a function" if frame is None else _place(frame.name, frame.filename, frame.lineno)
        self._breaks[where] = self._breaks.get(where) or why

    def mark(self, inputs: Any) -> Mark:
        """What `line_of` goes by: a call with these arguments begins."""
        return _latest(), frozenset(first_nodes(inputs))

    def line_of(self, model: nn.Module, outputs: Any, mark: Mark) -> str | None:
        """One line about the call that has ended; None where all was captured, or nothing compiled.

        Args:
            model: the model that was called.
            outputs: its results, with autograd's graph behind them.
            mark: from before the call.
        """
        latest, before = mark
        if _latest() is latest:
            return None
        places, operations = self._found(model, outputs, latest, before)
        return _line(places or [_forward_of(model)], operations) if places or operations else None

    def line_of_all(self, model: nn.Module, outputs: Any, mark: Mark) -> str:
        """As `line_of`, of a call of which nothing was captured, whether or not anything was compiled."""
        places, operations = self._found(model, outputs, *mark)
        return _line(places or [_forward_of(model)], operations)

    def rehearses(self, model: nn.Module, outputs: Any, mark: Mark) -> None:
        """Remember that of the call that is rehearsed; arguments as of `line_of`."""
        self.rehearsed = self.line_of_all(model, outputs, mark)

    def _found(
        self, model: nn.Module, outputs: Any, latest: Any, before: frozenset[Any]
    ) -> tuple[list[str], list[str]]:
        """Places, and operations."""
        operations, given_up = list(_eager(outputs, before)), self._look(latest)
        if operations or given_up or self._breaks or not self._is_whole(model):
            given_up += self._before(model)
        places = list(dict.fromkeys(given_up))
        # Else what follows a break is captured too, or computes nothing, as a print.
        if operations or not torch.is_grad_enabled():
            places += [where + why for where, why in self._breaks.items()]
        return places, operations

    def _look(self, latest: Any) -> list[str]:
        """The functions that Dynamo gave up since this compilation, and those before it that it still lists."""
        found, new = [], latest is None
        known = compilations()
        new = new or not any(item is latest for item in known)
        for item in known:
            function = item.co_name or "", item.co_filename or "", item.co_firstlineno or 0
            if item.fail_type is None:
                self._given_up.pop(function, None)  # it was reset since
            elif item.fail_type == "Unsupported" and item.co_filename and item.co_firstlineno:
                why = (item.fail_reason or "").splitlines()[0]
                self._given_up[function] = f"{_place(*function)} ({why})"
                found += [self._given_up[function]] if new else []
            new = new or item is latest
        return found

    def _before(self, model: nn.Module) -> list[str]:
        """The model's functions that Dynamo gave up earlier, of another model of the class: it tries none anew."""
        kinds = {type(module): None for module in model.modules()}
        codes = (getattr(function, "__code__", None) for kind in kinds for function in _forwards(kind)[-1:])
        functions = ((code.co_name, code.co_filename, code.co_firstlineno) for code in codes if code is not None)
        return [self._given_up[function] for function in functions if function in self._given_up]

    def _is_whole(self, model: nn.Module) -> bool:
        """Whether a graph has ended with the model's own forward, or with what Dynamo calls it by: hooks are in it."""
        codes = filter(None, (getattr(function, "__code__", None) for function in _forwards(type(model))))
        own = {(code.co_filename, line) for code in codes for _, _, line in code.co_lines()}
        return any(end in own or end[0] == ENTRY_FILE for end in self._ends)


def _forwards(kind: type[nn.Module]) -> list[Any]:
    """A class's forward, and what its decorators have wrapped, which comes last."""
    found = [getattr(kind, "forward", kind)]
    while hasattr(found[-1], "__wrapped__"):
        found.append(found[-1].__wrapped__)
    return found


def _forward_of(model: nn.Module) -> str:
    own = type(model).__name__
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return own if code is None else _place(f"{own}.forward", code.co_filename, code.co_firstlineno)


def _line(places: list[str], operations: list[str]) -> str:
    found = [_named(places)] if places else []
    if operations:
        found.append(f"operations {_named(operations)}")
    return OUTSIDE + "; ".join(found)


def _eager(outputs: Any, before: frozenset[Any]) -> Iterator[str]:
    """The kinds of operations with gradients behind these tensors that were not compiled, down to those nodes."""
    seen, waiting = set(before), first_nodes(outputs)
    told: set[str] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        name = re.sub(r"Backward\d*$", "", node.name())
        if name not in told and not _NOTHING.fullmatch(name):
            told.add(name)
            yield name
        waiting += [following for following, _ in node.next_functions if following is not None]


def _latest() -> Any:
    """The latest compilation of Dynamo's."""
    known = compilations()
    return known[-1] if known else None


def _place(name: str, file: str, line: int | None) -> str:
    return f"{name}, {os.path.basename(file)}:{line}"


def _named(items: Iterable[str]) -> str:
    listed = list(items)
    more = f" and {len(listed) - _MOST} more" if len(listed) > _MOST else ""
    return ", ".join(listed[:_MOST]) + more
