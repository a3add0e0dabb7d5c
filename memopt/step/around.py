"""What the caller's loop holds around a model's graphs: seen in the first steps, and counted in later plans.

Between forward's end and backward's start that is the loss where the model returns none, or several, a second model, or
what is logged. What is left of it when backward begins, and outputs of earlier steps, are there in later steps too.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memopt.common.garbage import collect
from memopt.memory.reach import plain_tensors, shown_tensors, storages_of
from memopt.memory.resident import storage_bytes
from memopt.memory.window import Window
from memopt.step.loop_bytes import SCALARS, Loop, Seen, worth
from memopt.step.observed_steps import Looking
from memopt.step.open_window import Ended, OpenWindow
from memopt.torch_compat import pytree
from memopt.torch_compat.autograd_nodes import at_end_of_backward, compiled_nodes, first_nodes, when_run
from memopt.torch_compat.backward import backward_task, keeps_graph

# What grows from step to step is planned for with a margin: size / _GROWTH.
_GROWTH = 8
# Calls of a step that are looked at from the first on; of more of them only the last one is.
_CALLS = 32


class Around:
    """Looks at the loop of one model.

    Attributes:
        seen: what it was seen to hold, at most.
        loop: what the latest step that was looked at has held; None before.
        looking: which of its steps are looked at.
    """

    def __init__(self) -> None:
        """Nothing is seen yet."""
        self.seen = Seen()
        self.loop: Loop | None = None
        self.looking = Looking()
        self._steps: dict[tuple[str, bool], int] = {}  # that a graph began, by its fingerprint, and that it ended
        self._seen_calls = 0  # how many calls of the present step were looked at, from its first one on
        self._outputs: list[tuple[int, weakref.ref[Any], int]] = []  # by number of the step: storages, and their bytes
        self._step = 0
        self._more = 0  # bytes by which a backward that keeps its graph takes more, at most so far
        self._left = 0  # bytes that earlier calls of the step have left
        self._most_left = 0  # the same at most, as calls without gradients began
        self._older = 0  # bytes of outputs of earlier steps that were there when backward began last
        self._forward = 0  # the same as forward began
        self._before_guess: int | None = None  # what was seen of these before this step, where its own are not yet
        self._after = 0  # bytes of all of the process behind backward, at most, since they were asked for
        self._made = frozenset[int]()  # where what the loop has made since an earlier call of the step lies
        self._open: OpenWindow | None = None
        self._waiting: tuple[OpenWindow, int] | None = None  # closed for a call without gradients; bytes that were left
        self._again: OpenWindow | None = None  # the last one, where its graph was kept for another backward

    def take_loop(self) -> Loop | None:
        """What the loop held in the latest step, once."""
        loop, self.loop = self.loop, None
        return loop

    def begins(self, left: int, *, new_step: bool, given: Any = ()) -> None:
        """A call is about to run, with gradients or without, and no window is open.

        Args:
            left: bytes that earlier calls of the step have left.
            new_step: whether no earlier call waits for its backward.
            given: its arguments: those that the loop has made since an earlier call are counted with the call.
        """
        arguments = shown_tensors(given) if self._made and left else ()
        parts = (part for leaf in arguments for part in plain_tensors(leaf))
        storages = storages_of(parts, allocated=True).values()
        self._left = max(0, left - sum(each.nbytes() for each in storages if each.data_ptr() in self._made))
        self._made = frozenset()
        if not torch.is_grad_enabled():
            self._most_left = max(self._most_left, self._left)
        if new_step:
            self._step, self._before_guess = self._step + 1, None
            self._forward = self.older_bytes()
            if self.older_bytes() > max(SCALARS, self._older + self.seen.forward):
                collect()  # a call that is planned leaves garbage, which may show its outputs
            more = self.older_bytes() - self._older
            if more > max(SCALARS, self.seen.forward):
                self._before_guess = self.seen.forward
                self.seen = self.seen.joined(Seen(forward=more + more // _GROWTH))

    @property
    def left(self) -> int:
        """Bytes that the loop made behind earlier calls of the step and holds as one without gradients begins.

        They are those of the present step where it is looked at, else the most of earlier ones.
        """
        return self._left if self._waiting is not None else self._most_left

    def is_due(self, key: str) -> bool:
        """Whether the next step of a call is looked at, whose graphs have this key."""
        return backward_task() == -1 and self.looking.is_due(self._steps.get((key, False), 0) + 1)

    def took_after(self) -> int:
        """The most bytes that the process has held at once behind a backward, since this was asked for; 0 if unseen."""
        most, self._after = self._after, 0
        return most

    def saw_apart(self, before: int, after: int) -> None:
        """What the process has held at once while no graph of the model ran: bytes, 0 where it was within the budget.

        Args:
            before: between an optimizer's step and this call.
            after: between backward's end and the optimizer's step, or the next call.
        """
        self.seen = self.seen.joined(Seen(before=before, after=after))

    def ended(self, call: Ended, outputs: Any, given: Any, look: Callable[[], None]) -> None:
        """A call with gradients has returned.

        Args:
            call: what is known of it.
            outputs: what it has returned.
            given: its arguments; outputs may be among them.
            look: called once more is known.
        """
        device = call.device
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        arguments = (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))
        own = storages_of(arguments, allocated=True)
        storages = storages_of((leaf for leaf in leaves if leaf.device == device), allocated=True)
        fresh = [storage for place, storage in storages.items() if place not in own]
        self._outputs = [item for item in self._outputs if item[1]() is not None]
        self._outputs += [(self._step, weakref.ref(storage), storage.nbytes()) for storage in fresh]
        due = self._is_due_now(call)
        # Of a call within backward (a reentrant checkpoint) autograd would end the recording unseen.
        looks = backward_task() == -1 and (call.window is not None or due)
        nodes = (compiled_nodes(outputs) or first_nodes(outputs)) if looks else []
        if call.window is not None and not nodes:
            call.window.close()
        self._seen_calls, self._waiting = call.number if nodes else 0, None
        if nodes:
            made = [each for step, known, _ in self._outputs if step == self._step and (each := known()) is not None]
            with self.looking.looks():
                window = call.window or Window(device, [*made, *_gradients(call)])
            window.forward_ends()
            self._open = OpenWindow(window, call, leaves, made, look, self._left)
            for node in nodes:
                reached = functools.partial(_reached, weakref.ref(self), weakref.ref(self._open))
                self._open.hooks.append(weakref.ref(reached))
                node.register_prehook(reached)
                if call.whole is not None:
                    when_run(node, functools.partial(_left, weakref.ref(window)))

    def _is_due_now(self, call: Ended) -> bool:
        """Whether what follows a call is looked at: of a step all calls, as what is left of each is beside the next."""
        if 1 < call.number <= _CALLS:
            return self._seen_calls == call.number - 1
        if call.number > 1 and not call.last:
            return False
        place = call.key, call.number > 1
        count = self._steps[place] = self._steps.get(place, 0) + 1
        return self.looking.is_due(count)

    def close(self) -> int:
        """Look no more, and say what was seen if backward has begun; bytes that are left if it has not."""
        current, self._open = self._open, None
        if current is None:
            return 0
        with self.looking.looks():
            held = current.window.close()
        _waiting.discard(self)
        if held is None:
            return 0
        if not current.window.backward:
            self._made, left = held.places, current.left + max(0, held.live)
            if current.awaited:
                self._waiting = current, left
            else:
                self._after = max(self._after, held.after)
            return left
        # Not less what outputs that are gone leave: they are there in forward, as is what the loop keeps.
        made = max(0, current.left + held.live + current.gone - current.gradients)
        current.kept, between = made + current.stays, current.left + held.peak
        # What is kept beyond backward is counted all through the step.
        beside = max(0, current.left + held.renewed - min(made, held.kept))
        if current.keeps:  # what comes then is beside what this plan saves, of which another one may save less
            current.kept += current.more_again(held)
            later = current.left + held.after_forward - current.call.let_go - current.kept
            # What the loop holds of its first backward stays in variables until its next one: nothing is taken off.
            beside = between = max(between, later)
        else:
            self._after = max(self._after, held.after)
        if current.others:
            return 0
        # A window that is open since before the call sees outputs of earlier steps go.
        older = self._older if current.call.window is None else self._forward
        beyond = current.left + held.live - current.gradients - current.saved + current.retains + older
        self.loop = Loop(self._forward, between + older, beyond, current.keeps, current.alone)
        device = current.call.device
        uncounted = current.gone if current.call.lets_go else 0
        found = Seen(beside + uncounted if worth(beside, device) else 0, worth(current.kept, device), 0, True)
        growth = (found.held - current.more) - (self.seen.held - self._more)
        if growth > 0 and self.seen.held > self._more:  # it grows
            found = dataclasses.replace(found, held=found.held + growth)
        self._more = max(self._more, current.more)
        self.seen = self.seen.joined(found)
        current.look()
        current.report_whole(held)
        return 0

    def others_run(self, gradients: bool) -> None:
        """A model that shares the budget is called: what its calls take is counted by that, not as the loop's."""
        if self._open is not None and not gradients and not self._open.window.backward:
            self.close()
        elif self._open is not None:
            self._open.others = True

    def resumes(self, outputs: Iterable[torch.Tensor]) -> None:
        """A call without gradients has returned these: the loop is looked at again, if it was before."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or self._open is not None or not waiting[0].awaited:
            return
        (current, left), device = waiting, waiting[0].call.device
        fresh = storages_of((each for each in outputs if each.device == device), allocated=True).values()
        made = (storage for reference, _ in current.made if (storage := reference()) is not None)
        with self.looking.looks():
            current.window = Window(device, [*made, *_gradients(current.call), *fresh])
        current.window.forward_ends()
        current.left = left + sum(storage.nbytes() for storage in fresh)
        current.call = current.call._replace(window=None, whole=None)  # parts of the whole were not seen
        self._open = current

    def _reached(self, current: OpenWindow, gradients: Sequence[torch.Tensor | None]) -> None:
        """Backward has reached a graph of the call, with these gradients."""
        if current is self._again and current.task != backward_task():
            self._kept(current)
        there = [gradient for gradient in gradients if gradient is not None]
        if current is not self._open or current.window.backward:
            if current.window.over:
                current.another_begins(backward_task(), _bytes_of(there))
            return
        current.task, self._again = backward_task(), current if keeps_graph() else None
        current.alone = all(gradient.numel() == 1 for gradient in there)
        current.gradients = current.call.early + _bytes_of(there)
        self._older = self.older_bytes()
        self._knows_forward()
        current.keeps = self._again is current
        current.more = current.call.kept() if current.keeps else 0
        current.retains = current.retained()
        current.held_by_others = current.without_tensors()
        current.stays = self._older + current.retains + current.more
        current.gone = sum(size for storage, size in current.made if storage() is None)
        current.window.backward_begins()
        at_end_of_backward(functools.partial(_over, weakref.ref(current)))
        if current.window.close() is None:  # where backward has to be over first
            _close_at_a_step(self)
        else:
            self.close()

    def _knows_forward(self) -> None:
        """Backward begins: of outputs of earlier steps only those that have gone by now are there in forward alone."""
        before, self._before_guess = self._before_guess, None
        if before is not None:
            gone = max(0, self._forward - self._older)
            forward = max(before, gone + gone // _GROWTH if gone > SCALARS else 0)
            self.seen = dataclasses.replace(self.seen, forward=min(self.seen.forward, forward))

    def _kept(self, current: OpenWindow) -> None:
        """Another backward has reached a graph that was kept for it: what the first one has made is beside it."""
        self._again, more = None, storage_bytes(current.call.gradients())
        current.stays += more
        if more and current is not self._open:  # it was closed before
            current.kept += more
            self.seen = self.seen.joined(Seen(held=worth(current.kept, current.call.device)))
            current.look()

    def kept_outputs(self) -> list[torch.UntypedStorage]:
        """Storages of outputs that are still there, of earlier steps too: they are counted here."""
        return [storage for _, reference, _ in self._outputs if (storage := reference()) is not None]

    def output_bytes(self) -> int:
        """Bytes of outputs that are still there, of this step too."""
        return sum(size for _, storage, size in self._outputs if storage() is not None)

    def older_bytes(self) -> int:
        """Bytes of outputs of earlier steps that are still there."""
        return sum(size for step, storage, size in self._outputs if step < self._step and storage() is not None)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages that have memory."""
    return sum(storage.nbytes() for storage in storages_of(tensors, allocated=True).values())


def _gradients(call: Ended) -> Iterable[torch.UntypedStorage]:
    """Storages of the gradients that there are as a call returns: `zero_grad` may let go of them before backward."""
    parts = (part for gradient in call.gradients() for part in plain_tensors(gradient))
    return storages_of(parts, allocated=True).values()


def _reached(
    around: weakref.ref[Around], window: weakref.ref[OpenWindow], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Backward has reached a call's graph."""
    here, current = around(), window()
    if here is not None and current is not None:
        here._reached(current, gradients)


def _left(window: weakref.ref[Window]) -> None:
    """Backward has left a graph."""
    current = window()
    if current is not None:
        current.graphs_end()


def _over(window: weakref.ref[OpenWindow]) -> None:
    """A backward is over."""
    current = window()
    if current is not None:
        current.over()


def _close_at_a_step(around: Around) -> None:
    """Close its window as soon as any optimizer is about to step, or has."""
    if not _handles:
        _handles.extend((register_optimizer_step_pre_hook(_stepping), register_optimizer_step_post_hook(_stepping)))
    _waiting.add(around)


def _stepping(*_: Any) -> None:
    """An optimizer is about to step: backward is over. Or it has stepped, by a closure in which backward ran.

    A window that stayed open then would end within the next step. Torch records the whole step, closure included: what
    one recording saw begin must not end in another one, which the closure would open (torch 2.13 writes to the first
    one's freed memory then).
    """
    if not torch.compiler.is_compiling():
        for around in list(_waiting):
            around.close()


# Hooks for good: torch goes through its hooks while they run, and several models' windows may be due in one step.
_handles: list[Any] = []
_waiting: weakref.WeakSet[Around] = weakref.WeakSet()
