"""The front door: graphs from torch.compile's machinery become programs, go through a session, and run on an engine.

Whatever torch.compile runs, memopt runs: graph breaks, keyword arguments, dict and dataclass outputs, tied weights,
frozen parameters, buffers and plain Python arguments are handled by Dynamo and AOTAutograd.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableSet, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import fx

from memopt.capture.dependence import (
    SavedFor,
    gradient_sources,
    places_of_tangents,
    saved_in_part,
    tangents_of,
    without_gradient,
)
from memopt.capture.export import refuse_layouts
from memopt.capture.graph_inputs import Names, called, origin_of
from memopt.capture.handed import Handed
from memopt.capture.joint import (
    Partitioned,
    erase_dead_draws,
    from_joint,
    mutations_in_place,
    program_of_graph,
    split,
)
from memopt.capture.keep_attention import keep_fused_attention
from memopt.capture.let_go import letting_go, mark_let_go
from memopt.capture.reached import reached_inputs
from memopt.capture.real_arguments import note_arguments, position_of
from memopt.capture.watched import Rewrite, Watched
from memopt.graph.weights import elsewhere, joined, only
from memopt.memory.hand_over import mark_handed, marked
from memopt.memory.ledger import apart
from memopt.program import InputKind, Program
from memopt.step.backward_entry import BackwardFacts, InPart
from memopt.step.call_role import CallRole
from memopt.step.guard import said
from memopt.step.hooked import EarlyGradients
from memopt.step.missing_tangents import filled
from memopt.step.own_copies import recomputed_from, shown_to_backward
from memopt.step.plan_request import PlanRequest
from memopt.step.trial_step import mutated
from memopt.torch_compat.dispatch import no_autocast
from memopt.torch_compat.dynamo import own_frames
from memopt.torch_compat.fake_tensors import no_fake_mode
from memopt.torch_compat.min_cut import partition_at
from memopt.torch_compat.source_files import TORCH

if TYPE_CHECKING:
    from memopt.compilation.session import Session as Compilation


class Session(Protocol):
    """Decides what becomes of each captured program; `memopt.compilation.session.Session` is the one that compiles."""

    early: EarlyGradients | None  # gradients that are handed over within backward, where the model is known
    role: CallRole  # of the call: where weights of an inference program are trained, no pass reads them

    @property
    def dry(self) -> bool:
        """Whether graphs are only collected: nothing needs to be compiled."""

    def may_lack(self, program: Program, graph_break: bool) -> bool:
        """Whether a step of a joint program may need its gradients handed over as they come, to keep the budget."""

    def names(self) -> Names:
        """Roles and qualified names of the model's tensors, by `id`; empty when the model is not known."""

    def inference(self, program: Program) -> Program:
        """Return the rewritten inference program."""

    def training(self, program: Program, graph_break: bool, request: PlanRequest | None) -> Program:
        """Return the rewritten joint program, planned as an engine requests, if it does."""

    def short_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """What the user reads when memory runs out in a step."""

    @property
    def functions(self) -> MutableSet[Watched]:
        """Inference functions that hold memory between calls, weakly."""


class Hooks:
    """What an engine calls while it lowers one Dynamo graph."""

    def __init__(self, session: Session, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.session = session
        names = session.names()
        keep_fused_attention(graph_module)
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self.origins = [origin_of(node, value, names) for node, value in zip(placeholders, example_inputs, strict=True)]
        self._called = [called(node, origin) for node, origin in zip(placeholders, self.origins, strict=True)]
        self._trained = [isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs]
        # Weakly: the caller's tensors are the caller's. Only inputs: a weight with a weak reference cannot be swapped.
        self._given = [
            weakref.ref(value) if isinstance(value, torch.Tensor) and origin.kind is InputKind.USER else None
            for value, origin in zip(example_inputs, self.origins, strict=True)
        ]
        self.handed = Handed()
        self.lets_go = False  # whether the caller is to let go of what is returned beside the loss before backward
        self.dry = session.dry
        self.captured: Program | None = None  # the joint program, once it was partitioned
        # The one of the first lowering: what is kept on disk goes by it. A graph that is lowered again may be simpler.
        self.first: Program | None = None
        self._joint: fx.GraphModule | None = None  # the graph that it was captured from
        self._forward_outputs = 0  # of that graph
        self._inferred: tuple[fx.GraphModule, Program] | None = None  # an inference graph, and its program
        self.kept: Any = None  # what an engine knows of the graph from one lowering of it to the next
        self.capturable: tuple[Any, Any] = None, None  # a function that an engine made, and its step, to be captured
        self.graph_gain: Any = None  # why it was; None where it was not
        self.tried = False  # whether a step was taken within the budget
        self.full_speed = True  # whether the allocator handed nothing back in it to keep that
        self.key = ""  # by which the step as it is settled is known to other processes; empty where it is not
        self.recomputed: Sequence[str] = ()  # names of the inputs that backward reads to recompute values
        self.in_part: Sequence[SavedFor] = ()  # what forward saves for some outputs only
        self.known_facts = BackwardFacts()  # of a step that was found on disk: there is no program of it
        # A function that an engine made, and what keeps its code for who lowers the graph again; None: nothing does.
        self.repeatable: tuple[Any, Callable[[], None] | None] = None, None
        self.graph_break = is_part(graph_module)
        self.needs_gradients = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
        )
        self._reached = reached_inputs(graph_module) if self.needs_gradients else {}

    @property
    def reaches_gradients(self) -> bool:
        """Whether it is certain before the graph is lowered that it has a backward."""
        return bool(self._reached)

    def called(self, place: int) -> str:
        """What a user calls an input of Dynamo's graph."""
        return self._called[place].removeprefix("input ")

    def dropped(self, names: Collection[str]) -> list[int]:
        """The places of the parameters by these names among the inputs of Dynamo's graph."""
        return [place for place, origin in enumerate(self.origins) if origin.target in names]

    def infers(self) -> None:
        """An engine has found that nothing which the graph computes needs gradients, though inputs do."""
        self.needs_gradients = False

    def let_go_before_backward(self) -> None:
        """The caller is to let go of what is returned beside the loss before backward."""
        self.lets_go = True

    def may_be_captured(self, run: Any, step: Any) -> None:
        """Have a step captured where `run`, which an engine made, is what runs it; both are None: nothing may be."""
        self.capturable = run, step

    def may_be_repeated(self, run: Any, keep: Callable[[], None] | None) -> None:
        """Have the code of `run` kept by `keep` for who lowers the graph again; None: it cannot be."""
        self.repeatable = run, keep

    def saves(self, recomputed: Sequence[str], in_part: Sequence[SavedFor]) -> None:
        """The lowered graph recomputes from these inputs, and saves this for some outputs only."""
        self.recomputed, self.in_part = recomputed, in_part

    def was_tried(self, tried: bool, *, full_speed: bool) -> None:
        """Whether a step was taken within the budget, and whether the allocator handed nothing back in it."""
        self.tried, self.full_speed = tried, full_speed

    def uses_cuda_graphs(self, gain: Any) -> None:
        """The step is captured for this; None: it is not."""
        self.graph_gain = gain

    def is_known_as(self, key: str) -> None:
        """Other processes know the step as it is settled by this key."""
        self.key = key

    def knows(self, facts: BackwardFacts) -> None:
        """The step was found on disk, with these facts: there is no program of it."""
        self.known_facts = facts

    def keeps(self, kept: Any) -> None:
        """An engine knows this of the graph from one lowering of it to the next."""
        self.kept = kept

    def goes_back_to(self, captured: Program | None) -> None:
        """The graph is this one again, as it was captured before."""
        self.captured = captured

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        request: PlanRequest | None = None,
        **options: Any,
    ) -> Partitioned:
        """AOTAutograd's partition function: plan the joint graph, as an engine requests, and cut it accordingly."""
        return self.cut(self.rewrite(joint, num_fwd_outputs, request), num_fwd_outputs, **options)

    def cut(self, program: Program, num_fwd_outputs: int, **options: Any) -> Partitioned:
        """Both graphs of a program that `rewrite` returned; the options are those of `partition`."""

        def extract(module: fx.GraphModule, saved: list[fx.Node]) -> Partitioned:
            static = _static_nodes(module, options.get("static_lifetime_input_indices"))
            return partition_at(module, saved, program.forward_outputs, static)

        self.handed.cut(program)
        forward, backward = split(program, extract)
        mark_let_go(forward, program)
        mark_handed(backward, program)
        erase_dead_draws(backward)
        self.recomputed = recomputed_from(forward, backward)
        in_part = saved_in_part(forward, backward, breaks=self.graph_break)
        # Where gradients are handed over within backward, versions of parameters are looked at there.
        self.in_part = [item for item in in_part if item.argument is None or not self.handed.gone]
        mutations_in_place(forward, program, num_fwd_outputs)
        return forward, backward

    def example_inputs(self) -> list[torch.Tensor | None]:
        """The caller's tensors that the graph was captured with, where they are still there; None for all else."""
        return [None if given is None else given() for given in self._given]

    def rewrite(self, joint: fx.GraphModule, forward_outputs: int, request: PlanRequest | None = None) -> Program:
        """The session's program for a joint graph, planned as the engine requests, if it does."""
        captured = self.capture(joint, forward_outputs)
        with outside_tracing():
            return self.session.training(captured, self.graph_break, request)

    def capture(self, joint: fx.GraphModule, forward_outputs: int) -> Program:
        """The program of a joint graph; the same one as long as it is asked for the same graph.

        Raises:
            CaptureError: a tensor is sparse.
        """
        if self.captured is None or self._joint is not joint:
            with outside_tracing():
                for node in joint.graph.nodes:
                    refuse_layouts(node)
                captured = from_joint(joint, forward_outputs, self.origins)
                captured = letting_go(captured) if self.lets_go else captured
                self.handed.find(captured, lambda: self.session.may_lack(captured, self.graph_break))
                self.captured, self._joint = marked(captured, self.handed.gone), joint
                self._forward_outputs = forward_outputs
                self.first = self.first or self.captured
                note_arguments(self.captured, self.example_inputs())
        return self.captured

    def backward_facts(self) -> BackwardFacts:
        """What is to be looked at when backward of the lowered graph begins."""
        program = self.captured
        if program is None:
            return self.known_facts
        places = {node.name: position_of(node) for node in program.placeholders}
        read = [place for place in map(places.get, self.recomputed) if place is not None]
        recomputed = tuple((place, self._called[place]) for place in read)
        return BackwardFacts(
            self._forward_outputs,
            gradient_sources(program, self._reached),
            recomputed,
            self._in_part(program, places),
            None if (written := mutated(program)) is None else tuple(sorted(written)),
            self._shown(program, places),
            tangents_of(program),
            tuple(place for place in without_gradient(program) if self._trained[place]),
        )

    def _shown(self, program: Program, places: Mapping[str, int | None]) -> tuple[tuple[int, str], ...]:
        """Arguments that backward reads as they lay when forward ran: eager's views, and what is saved in part."""
        in_part = [item.argument for item in self.in_part if item.argument is not None]
        names = dict.fromkeys([*shown_to_backward(program), *in_part])
        return tuple((place, self._called[place]) for place in map(places.get, names) if place is not None)

    def _in_part(self, program: Program, places: Mapping[str, int | None]) -> tuple[InPart, ...]:
        outputs, found = places_of_tangents(program), []
        if not self.in_part or None in outputs.values():
            return ()
        for item in self.in_part:
            place = places.get(item.argument or "")
            called = "an output of the model" if place is None else self._called[place]
            found.append(
                InPart(item.place, called, tuple(outputs[name] or 0 for name in item.tangents), item.recomputed)
            )
        return tuple(found)

    def forget(self) -> None:
        """Let go of the joint graph, and of what an engine keeps: the graph is lowered."""
        if self.kept is not None:
            self.kept.forget()  # compiled code may hold it, by what made that
        self._joint = self._inferred = self.kept = None

    def apart(self, run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
        """Forward or backward of a graph that is only collected, which the ledger of what runs outside leaves out."""
        return apart(run, lambda: getattr(self.session, "ledger", None))

    def backward(self, run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
        """A compiled backward, which says in one line when memory runs out in it."""
        session = self.session
        if self.dry:
            run = self.apart(run)
        return said(filled(run), lambda error: session.short_of_memory(error))

    def inference(self, graph_module: fx.GraphModule) -> tuple[Program, Rewrite]:
        """Rewrite an inference graph.

        Returns:
            The rewritten program, and a function that rewrites it anew for new values of its parameters and buffers;
            where they are said to be trained, no pass reads them.
        """
        # A module is taken over, and may be asked for again: where what was made of it takes more than the budget.
        if self._inferred is None or self._inferred[0] is not graph_module:
            with outside_tracing():
                self._inferred = graph_module, program_of_graph(graph_module, self.origins)
        captured = self._inferred[1]

        def rewrite(state: Mapping[str, torch.Tensor], trained: bool = False) -> Program:
            known = joined(captured.state, elsewhere(state, captured.state))
            read = {entry.name for entry in captured.inputs if entry.kind is InputKind.CONSTANT}
            visible = only(known, read) if trained else known
            with outside_tracing():
                found = self.session.inference(dataclasses.replace(captured, state=visible))
            there = only(known, {entry.name for entry in found.inputs})
            return dataclasses.replace(found, state=joined(there, found.state)) if trained else found

        return rewrite({}, self.session.role.trained_beside), rewrite

    def held(self, function: Watched) -> Watched:
        """The same function, which gives back what it holds between calls once its model's stand-in is gone.

        Dynamo keeps it as long as the model itself.
        """
        self.session.functions.add(function)
        function.lies_beside(self.session.functions)
        return function


def compilation_of(hooks: Hooks) -> Compilation:
    """The session of a graph's hooks as engines that plan know it."""
    return cast("Compilation", hooks.session)


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Real tensors behave as real again: no fake mode, no autocast, no gradients."""
    with no_fake_mode(), no_autocast(), torch.no_grad():
        yield


def is_part(graph_module: fx.GraphModule) -> bool:
    """Whether the graph that is being compiled is one of several of a call, as far as that is known."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    return bool(reason is not None and reason.graph_break) or _inside_eager_code()


def _inside_eager_code() -> bool:
    """Whether the frame being compiled was called by the model's own code, run eagerly since Dynamo gave it up.

    Then there may be other graphs, although this one ends with its frame: a block within `with lock:` is one.
    """
    frame, tracing, eager = sys._getframe(), True, False
    evaluates, compiles = own_frames()
    while frame is not None and (tracing or frame.f_code.co_filename != evaluates):
        name = frame.f_code.co_filename
        if not tracing and not name.startswith(TORCH):
            eager = True
        if tracing and name == compiles:
            tracing = False
        frame = frame.f_back  # type: ignore[assignment]
    return eager and frame is not None


def _static_nodes(module: fx.GraphModule, indices: Sequence[int] | None) -> list[fx.Node]:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [placeholders[index] for index in indices or ()]
