"""The short way to a graph that was compiled: the same guards and the same code as Dynamo's, without what lies around.

A compiled call goes through `torch.compile`'s wrapper, a module's hooks, the frame evaluation and the settings that a
compilation needs, which take several times as long as the guards themselves. None of that changes from call to call:
where a call was one graph from end to end, its guards are asked directly, and the code that Dynamo made of the model's
`forward` is called as a function. What the guards do not hold is checked beside them; wherever anything differs, the
call goes the long way.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from memopt.common.garbage import not_collecting
from memopt.cuda_graphs.speculative import EarlyStart
from memopt.torch_compat.guarded_code import entries_of, innermost, nothing_in_force
from memopt.torch_compat.modules import goes_straight

_MOST = 8  # graphs of one model that are tried before a call goes the long way
_ATTEMPTS = 16  # calls after which no more is looked for, as none was found or there are too many
_GRAPH = "__compiled_fn"  # so begins the name by which Dynamo's code calls a graph

Plan = tuple[bool, int, bool, str]  # `Kind.plan`
Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class Kind(NamedTuple):
    """A kind of call, whose graphs are no other kind's.

    Attributes:
        gradients: whether autograd records it.
        accumulating: whether gradients exist: backward adds to them, and a call without gradients runs beside them.
            Either takes a plan of its own.
        calls: how many calls there are before the first backward, where they are planned together.
        beside: whether it is planned with what earlier calls of the step hold.
        loss_alone: what its caller takes a loss by, where its code proves that it takes nothing else; else empty.
    """

    gradients: bool
    accumulating: bool
    calls: int = 1
    beside: bool = False
    loss_alone: str = ""

    @property
    def plan(self) -> tuple[bool, int, bool, str]:
        """What its compilation goes by: with gradients and without share one."""
        return self.accumulating, self.calls, self.beside, self.loss_alone

    @property
    def alone(self) -> bool:
        """Whether its gradients are final in its own backward: those of several calls wait for the last of these."""
        return self.calls == 1 and not self.beside


@dataclasses.dataclass
class _Known:
    """What is known of one kind of call."""

    graphs: tuple[FastPathGraph, ...] = ()
    left: int = _ATTEMPTS


class FastPathCalls:
    """The graphs of one model that can be called directly, the latest first, by kind of call."""

    def __init__(self, model: nn.Module) -> None:
        """Nothing is known before the first call."""
        self._model = model
        self._known: dict[Kind, _Known] = collections.defaultdict(_Known)
        # By plan, and whether sizes are symbols.
        self._whole: dict[tuple[Plan, bool], weakref.WeakSet[Callable[..., Any]]] = collections.defaultdict(
            weakref.WeakSet
        )

    def clear(self) -> None:
        """All calls go the long way: the model is planned anew."""
        self._known.clear()
        self._whole.clear()

    def forget(self, plan: Plan) -> None:
        """Calls of these kinds go the long way: they are planned anew."""
        for kind in [kind for kind in self._known if kind.plan == plan]:
            del self._known[kind]
        for symbolic in (False, True):
            self._whole.pop((plan, symbolic), None)

    def forget_symbolic(self, plan: Plan) -> None:
        """Such calls go the long way as far as sizes of their graphs are symbols."""
        for kind, known in self._known.items():
            if kind.plan == plan:
                known.graphs = tuple(graph for graph in known.graphs if not graph.symbolic)

    def noting(self, backend: Backend, plan: Plan, *, symbolic: bool = False) -> Backend:
        """The Dynamo backend, which notes what it makes of graphs that end where their function ends.

        Args:
            backend: makes functions of graphs.
            plan: of the kinds of calls that it does so for.
            symbolic: whether sizes of these graphs are symbols.
        """
        whole = self._whole[plan, symbolic]

        @functools.wraps(backend)
        def noted(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            made = backend(graph_module, example_inputs)
            reason = getattr(graph_module, "compile_subgraph_reason", None)
            if reason is not None and not reason.graph_break:
                whole.add(innermost(made))
            return made

        return noted

    def find(
        self, kind: Kind, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, early: bool = True
    ) -> FastPathGraph | None:
        """The graph that such a call of the model with these arguments would run; None where it must go the long way.

        The device may have begun with it: the graph's `end` must follow, whether it is run or not.

        Args:
            kind: of call.
            args, kwargs: of the call.
            early: whether the device may begin.
        """
        known = self._known[kind]
        graphs = known.graphs
        if not graphs or not nothing_in_force():
            return None
        first, found = graphs[0], None
        if early and not first.gone:
            first.early.begin(args, kwargs)
        try:
            found = next((graph for graph in graphs if graph.holds(self._model, args, kwargs)), None)
        finally:
            if found is not first:
                first.end()
        if found is None:
            known.graphs = tuple(graph for graph in graphs if not graph.gone)
        elif found is not first:
            known.graphs = _in_turn(found, graphs)
        return found

    def learn(
        self, kind: Kind, compiled: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, symbolic: bool = False
    ) -> None:
        """Look for the graph that a call has just run, which went the long way.

        Args:
            kind: of call.
            compiled: what `torch.compile` made of the model for it, with a backend that is `noting`.
            args: the call's positional arguments.
            kwargs: the call's keyword arguments.
            symbolic: whether sizes of its graph are symbols.
        """
        known = self._known[kind]
        if not known.left or not nothing_in_force():
            return
        graph = self._ran(kind, compiled, args, kwargs, symbolic)
        if graph is None:
            known.left -= 1
            return
        known.left -= len(known.graphs) == _MOST  # it takes another one's place
        known.graphs = _in_turn(graph, known.graphs)

    def _ran(
        self, kind: Kind, compiled: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], symbolic: bool
    ) -> FastPathGraph | None:
        whole = self._whole[kind.plan, symbolic]
        for function, owner in _frames(self._model, compiled):
            with not_collecting():  # torch hands out entries that it deletes when another model of the class dies
                for entry in entries_of(function.__code__):
                    if entry.code is not None and _is_whole(function, entry.code, whole):
                        graph = FastPathGraph(function, owner, entry, self._model, symbolic=symbolic)
                        if graph.holds(self._model, args, kwargs):
                            return graph
        return None


def _is_whole(function: types.FunctionType, code: types.CodeType, whole: weakref.WeakSet[Callable[..., Any]]) -> bool:
    """Whether Dynamo's code of a function calls one graph, which is one of these, and nothing after it."""
    graphs = [function.__globals__[name] for name in code.co_names if name.startswith(_GRAPH)]
    same_cells = code.co_freevars == function.__code__.co_freevars
    return same_cells and len(graphs) == 1 and innermost(graphs[0]) in whole


def _in_turn(first: FastPathGraph, others: Sequence[FastPathGraph]) -> tuple[FastPathGraph, ...]:
    """The graphs to be asked, this one first; those for one size, which have a plan of their own, before all others."""
    graphs = [first, *(graph for graph in others if graph is not first)]
    many = [graph for graph in graphs if graph.symbolic][: _MOST // 2]
    return (*[graph for graph in graphs if not graph.symbolic][: _MOST - len(many)], *many)


class FastPathGraph:
    """One compiled frame: its guards, and what goes without saying where Dynamo evaluates the frame itself.

    Attributes:
        call: the function of Dynamo's code.
        early: starts the device before the guards are asked.
        symbolic: whether sizes are symbols.
    """

    def __init__(
        self,
        function: types.FunctionType,
        owner: type[nn.Module] | None,
        entry: Any,
        model: nn.Module,
        *,
        symbolic: bool = False,
    ) -> None:
        self.symbolic = symbolic
        self._function, self._owner = function, owner
        self._code, self._defaults, self._keywords = function.__code__, function.__defaults__, function.__kwdefaults__
        self._cells = tuple(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._guards = entry.guard_manager
        self._locals = _as_method(_with_defaults(_binder(function.__code__), function), owner, model)
        run = types.FunctionType(entry.code, function.__globals__, function.__name__, None, function.__closure__)
        self.call = _as_method(_with_defaults(run, function), owner, model)
        self.early = EarlyStart()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run Dynamo's code, where the guards hold, and see whether the next such call can begin early."""
        return self.early.run(self.call, args, kwargs)

    def end(self) -> None:
        """The call that the graph was found for has ended, or will not run it."""
        self.early.end()

    @property
    def gone(self) -> bool:
        """Whether Dynamo has dropped the code: it was reset, or something that its guards look at has died."""
        return self._guards.cache_entry is None

    def holds(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call of the model with these arguments would run this code."""
        function = self._function
        if self._owner is not None and not goes_straight(model, self._owner, function):
            return False
        same = function.__code__ is self._code and function.__defaults__ is self._defaults
        if not same or function.__kwdefaults__ is not self._keywords or self.gone:
            return False
        try:
            values = self._locals(*args, **kwargs)
            for name, cell in self._cells:
                values[name] = cell.cell_contents
        except (TypeError, ValueError):  # arguments that the function does not take, or an empty cell
            return False
        return bool(self._guards.check(values))


def _frames(model: nn.Module, compiled: Any) -> list[tuple[types.FunctionType, type[nn.Module] | None]]:
    """The function whose frame is compiled, and the model's class where that is reached by calling the model."""
    entered = innermost(compiled.forward)
    if isinstance(entered, types.FunctionType):
        return [(entered, None)]
    function = getattr(type(model), "forward", None)
    if isinstance(function, types.FunctionType) and goes_straight(model, type(model), function):
        return [(function, type(model))]
    return []


def _binder(code: types.CodeType) -> types.FunctionType:
    """A function that takes what a function of this code takes, and returns it by name."""
    count, named = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names = list(code.co_varnames[: named + 2])
    stars = names[named:]
    parameters = names[:count]
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    if code.co_flags & inspect.CO_VARARGS:
        parameters.append(f"*{stars.pop(0)}")
    elif code.co_kwonlyargcount:
        parameters.append("*")
    parameters += names[count:named]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        parameters.append(f"**{stars.pop(0)}")
    namespace: dict[str, Any] = {}
    exec(f"def bind({', '.join(parameters)}): return locals()", namespace)
    return namespace["bind"]  # type: ignore[no-any-return]


def _with_defaults(made: types.FunctionType, function: types.FunctionType) -> types.FunctionType:
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


def _as_method(function: types.FunctionType, owner: type[nn.Module] | None, model: nn.Module) -> Callable[..., Any]:
    return function if owner is None else types.MethodType(function, model)
