"""Backward in pieces: gradients go to their parameters' hooks as soon as they are final, not all at its end.

A compiled backward is one node of autograd's graph, which returns all gradients at once. Here each parameter with such
hooks reaches the compiled function through a relay, a node of its own. Backward begins in the compiled function's node,
which returns nothing; each relay then runs it on to where its gradients are, and returns those. So autograd itself
accumulates them, calls hooks, and waits for what other parts of the graph add: whatever holds of eager's nodes holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from memopt.step.backward_entry import look_of, no_gradient, refuse
from memopt.step.hooked import ToBeGone, spare
from memopt.torch_compat.autograd_nodes import at_end_of_backward
from memopt.torch_compat.backward import running_node
from memopt.torch_compat.boxed import boxed

REST = -1  # the number of the relay of all other inputs

# Makes the generator of one backward: of the arguments, and of what takes the gradients of a hand-over.
Generate = Callable[[list[Any], Callable[[int, Sequence[Any]], None]], Iterator[None]]


class Step:
    """One run of a compiled function that is in backward, or will be."""

    def __init__(self, dropped: Sequence[torch.Tensor], watched: ToBeGone) -> None:
        """Backward has not begun.

        Args:
            dropped: the parameters whose gradients hooks are to drop.
            watched: what is called where gradients stay.
        """
        self._dropped, self._watched = dropped, watched
        self._added: list[weakref.ref[torch.Tensor]] = []  # of the last hand-over, what was to be added to others
        self._pieces: Iterator[None] | None = None
        self._given: dict[int, Sequence[Any]] = {}
        self._advance: Callable[[list[Any]], Sequence[Any]] = _advance
        self._rest: Callable[[Sequence[Any]], Sequence[Any]] = list

    def begin(
        self,
        generate: Generate,
        args: list[Any],
        advance: Callable[[list[Any]], Sequence[Any]],
        node: Any,
        outputs: Sequence[Sequence[int]],
    ) -> None:
        """Run backward to its first hand-over.

        Args:
            generate: makes the generator of it.
            args: of it.
            advance: runs a piece.
            node: of autograd's graph, whose backward it is.
            outputs: by hand-over, which of the results it gives.
        """
        none, look = no_gradient(node), look_of(node)

        def existing(pairs: Iterable[tuple[int, Any]]) -> list[Any]:
            values = [None if place in none else value for place, value in pairs]
            look(values)
            return values

        given = self._given = {}

        def give(number: int, gradients: Sequence[Any]) -> None:  # knows of no step: both would wait for garbage
            given[number] = existing(zip(outputs[number], gradients, strict=True))

        self._rest = lambda gradients: existing(enumerate(gradients))
        self._pieces, self._advance = generate(args, give), advance
        at_end_of_backward(self._end)
        self._run_on()

    def _end(self) -> None:
        """Let go of what no relay has asked for: code that stands behind its last hand-over holds what it last read."""
        self._pieces, self._given = None, {}
        if any(parameter.grad is not None for parameter in self._dropped):
            self._watched.keeps()

    def adds(self, gradients: Sequence[torch.Tensor]) -> None:
        """Note what autograd is to add to existing gradients before it asks for the next ones."""
        self._added = [weakref.ref(gradient) for gradient in gradients]

    def take(self, number: int) -> Sequence[Any]:
        """The gradients of a hand-over, or of the rest: backward is run on to where they are. They are given once."""
        if any(gradient() is not None for gradient in self._added):
            self._watched.waits()
        self._added = []
        while number not in self._given and self._pieces is not None:
            self._run_on()
        return self._given.pop(number, ())

    def _run_on(self) -> None:
        done = self._advance([self._pieces])
        if done:
            self._given[REST] = self._rest(done[0])
            self._pieces = None


def in_pieces(
    generate: Generate,
    count: int,
    outputs: Sequence[Sequence[int]],
    guarded: Callable[[Callable[[list[Any]], Sequence[Any]]], Any],
) -> Callable[[list[Any]], Sequence[Any]]:
    """The compiled backward whose gradients its relays return.

    Args:
        generate: makes the generator of a backward.
        count: how many gradients AOTAutograd expects.
        outputs: by hand-over, which of them it gives.
        guarded: wraps what runs a piece, for errors.
    """
    advance = guarded(_advance)

    def backward(args: list[Any]) -> Sequence[Any]:
        node = running_node()
        relays = () if node is None else (function for function, _ in node.next_functions)
        step = next((relay.memopt_step for relay in relays if hasattr(relay, "memopt_step")), None)
        if step is None:
            raise RuntimeError("backward was called apart from the step that it belongs to")
        step.begin(generate, args, advance, node, outputs)
        return [None] * count

    return boxed(backward)


def drained(
    generate: Generate, give: Callable[[int, Sequence[Any]], None] = lambda number, gradients: None
) -> Callable[[list[Any]], Sequence[Any]]:
    """The same from begin to end: what is handed over is given there, or dropped at once."""

    def run(args: list[Any]) -> Sequence[Any]:
        pieces = generate(args, give)
        done: Sequence[Any] = ()
        while not done:
            done = _advance([pieces])
        results: Sequence[Any] = done[0]
        return results

    return run


def relayed(
    run: Callable[..., Any],
    outputs: Sequence[Sequence[int]],
    sources: Sequence[int],
    watched: ToBeGone,
) -> Callable[..., Any]:
    """A compiled function whose inputs reach it through relays.

    Args:
        run: the function.
        outputs: by hand-over, in order, which of backward's gradients it gives.
        sources: per gradient of backward, which input it is of.
        watched: the inputs whose gradients are to be gone once they were handed over.
    """
    groups = [[sources[number] for number in given] for given in outputs]
    handed = {index for group in groups for index in group}
    seen, adding = [index for index in watched.dropped if index in handed], handed.intersection(watched.added)

    relay: Any = _Relay.apply

    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args)
        values, step = list(args), Step([args[index] for index in seen], watched)
        trained = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor) and value.requires_grad]
        others = [index for index in trained if index not in handed]
        # Of nodes that are ready autograd runs the latest first: what is handed over first is made last.
        for number, group in ((REST, others), *reversed([*enumerate(groups)])):
            wanted = [index for index in group if index in trained]
            order = sources if number == REST else group
            places = [order.index(index) if index in order else None for index in wanted]
            if wanted:
                adds = [index in adding for index in wanted]
                passed = relay(step, number, places, adds, *(values[index] for index in wanted))
                for index, value in zip(wanted, passed, strict=True):
                    values[index] = value
        return run(*values)

    return call


class _Relay(torch.autograd.Function):
    """Passes tensors on; its backward returns the gradients that a step has for them by then."""

    @staticmethod
    def forward(
        ctx: Any, step: Step, number: int, places: list[int | None], adds: list[bool], *tensors: torch.Tensor
    ) -> Any:
        ctx.memopt_step, ctx.number, ctx.places, ctx.adds, ctx.parameters = step, number, places, adds, tensors
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *added: Any) -> Any:
        found = ctx.memopt_step.take(ctx.number)
        own = [None if place is None or place >= len(found) else found[place] for place in ctx.places]
        del found
        if torch.is_grad_enabled():
            once: Any = _Once.apply
            own = [value if value is None else once(torch.ones((), requires_grad=True), value) for value in own]
        # What the caller made of a parameter that the function returns comes beside it.
        for index, more in enumerate(added):
            if more is not None:
                own[index] = more if own[index] is None else own[index] + more
        for parameter, value in zip(ctx.parameters, own, strict=True):
            if value is None:
                spare(parameter)
        given = zip(own, ctx.adds, ctx.parameters, strict=True)
        # What is set to None before backward gets the gradient itself, which stays.
        ctx.memopt_step.adds([v for v, adds, p in given if adds and v is not None and p.grad is not None])
        return None, None, None, None, *own


class _Once(torch.autograd.Function):
    """A gradient that is not to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, mark: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse(gradients)


def _advance(pieces: list[Any]) -> Sequence[Any]:
    """Run a generator to its next hand-over: nothing, or what it returns at its end, in a list."""
    try:
        next(pieces[0])
    except StopIteration as end:
        return [end.value]
    return []
