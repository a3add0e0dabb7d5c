"""The static backend: an inference program in one preplanned arena; a later call allocates its results only.

Every value has its place before the first call (`memopt.passes.plan_buffers`). Operators write there by true out=
overloads, by in-place overloads, or by recipes made of such; those that can do neither allocate for themselves. Views
of the arena are made once, when a program is bound to it. Results live in fresh memory at every call, so a caller may
hold them as long as it likes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import fx

from memopt.backends.aten import Boxed, emit, emit_collected
from memopt.backends.cuda_graph import Replay
from memopt.backends.inputs import UserInputs
from memopt.backends.watched import WatchedProgram
from memopt.capture.dynamo import Hooks
from memopt.cuda_graphs.speculative import meet
from memopt.engine import Engine
from memopt.memory.allocator import OWN_SEGMENT, own_segment
from memopt.memory.buffers import BufferPlan, Home
from memopt.memory.rounding import allocated_bytes
from memopt.memory.timeline import Timeline
from memopt.passes.plan_buffers import Form, plan_buffers
from memopt.program import InputKind, Program, draws_numbers, tensors_of
from memopt.static.code import Code, generate
from memopt.static.forms import is_joinable, write_of
from memopt.static.write import Write
from memopt.torch_compat.aot_autograd import aot_autograd
from memopt.torch_compat.boxed import boxed
from memopt.torch_compat.dead_draws import dead_draws_kept
from memopt.torch_compat.fake_tensors import no_fake_mode
from memopt.torch_compat.whole_operators import whole_operators


class StaticBackend(Engine):
    """Runs inference in one arena per device, which all programs of a model share."""

    name = "static"
    exact = False

    def __init__(self, *, graphs: bool = False) -> None:
        """Make an engine.

        Args:
            graphs: on CUDA, replay each program as one CUDA graph where that is possible.
        """
        self._graphs = graphs
        self._arenas: dict[torch.device, Arena] = {}

    def compile_captured(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks
    ) -> Callable[..., Any]:
        """Lower one Dynamo graph.

        Raises:
            RuntimeError: gradients are asked for.
        """
        if hooks.needs_gradients and not hooks.dry:
            raise RuntimeError(
                'backend "static" runs inference only: call the model under torch.no_grad(), or train with "aten"'
            )

        def operators(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            return emit(module)

        def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            if hooks.dry:
                return emit_collected(module, hooks)
            program, rewrite = hooks.inference(module)
            return hooks.held(WatchedProgram(program, rewrite, self.bind))

        lower = aot_autograd(
            fw_compiler=operators, bw_compiler=operators, inference_compiler=inference, partition_fn=hooks.partition
        )
        with dead_draws_kept(), whole_operators(example_inputs):
            return lower(graph_module, example_inputs)

    def bind(self, program: Program) -> StaticFunction:
        """Plan a program's memory and bind it to the arena of its device."""
        with no_fake_mode(), torch.no_grad():  # graphs arrive while AOTAutograd still traces
            device = device_of(program)
            arena = self._arenas.get(device) or self._arenas.setdefault(device, Arena(device))
            return StaticFunction(program, arena, graphs=self._graphs)

    def timeline(self, program: Program, workspace: Mapping[str, int] | None = None) -> Timeline:
        """The memory of a call: the arena and what a graph holds all the time, results and what operators allocate.

        Args:
            program: an inference program.
            workspace: bytes by node name; they count for operators that allocate for themselves.
        """
        plan, writes = plan_for(program)
        extra = {name: (workspace or {}).get(name, 0) for name in writes if writes[name] is None}
        return timeline_of(plan, extra, held=graph_bytes(program) if self._graphs else 0)

    def buffer_plan(self, program: Program) -> BufferPlan:
        """Where the values of an inference program live."""
        return plan_for(program)[0]

    def __reduce__(self) -> Any:
        return _engine, (self._graphs,)


def _engine(graphs: bool) -> StaticBackend:
    return StaticBackend(graphs=graphs)


class Arena:
    """One block of a device's memory that grows to what the largest program needs; one call at a time uses it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._stream: torch.cuda.Stream | None = None
        self._begun: Replay | None = None
        self.bound: WeakSet[StaticFunction] = WeakSet()  # programs with views of the memory

    def wait(self) -> None:
        """On CUDA, let the current stream begin when the call before, on whatever stream, is done with the arena."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream

    def begin(self, replay: Replay, given: Sequence[torch.Tensor]) -> bool:
        """Start a graph before its call; whether that was done: then it is this thread's turn until `end`."""
        if not self.lock.acquire(blocking=False):
            return False
        begun = False
        try:
            if self._begun is None:
                self.wait()
                begun = replay.begin(given)
        finally:
            if begun:
                self._begun = replay
            else:
                self.lock.release()
        return begun

    def end(self) -> bool:
        """End the turn that began early; whether a call has taken what was begun."""
        replay, self._begun = self._begun, None
        assert replay is not None
        taken = replay.was_used()
        self.lock.release()
        return taken

    def reserve(self, nbytes: int) -> torch.Tensor:
        """The arena's memory, with at least `nbytes` bytes; what was there before it grew is lost."""
        if self.memory.numel() < nbytes:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # other streams may still use it
            self.give_back()  # the old one goes first
            large = self.device.type == "cuda" and nbytes >= OWN_SEGMENT
            with own_segment() if large else contextlib.nullcontext():
                self.memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.memory

    def give_back(self) -> None:
        """Give the memory back: no program keeps a view of it."""
        for function in list(self.bound):
            function.unbind()
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)


class StaticFunction:
    """A program bound to an arena: takes the values of all inputs but constants in a list, which it empties.

    Calls from several threads take turns. Attributes: `plan`, where everything lives; `code`, what runs.
    """

    def __init__(self, program: Program, arena: Arena, *, graphs: bool = False) -> None:
        """Plan the memory and generate the code; nothing is allocated before the first call."""
        self.plan, self.writes = plan_for(program)
        self.code: Code = generate(program, self.plan, self.writes)
        self._arena = arena
        self._bound_to: torch.Tensor | None = None
        self._run: Callable[..., Any] | None = None
        self._replay: Replay | None = None
        self._code_run: Any = None  # what a CUDA graph is made of, or the same
        boxed(self)
        self._graphs = graphs and arena.device.type == "cuda" and not any(draws_numbers(node) for node in program.calls)
        self._inputs = UserInputs(program)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run.

        Raises:
            TypeError: there are more or fewer values than inputs.
            ValueError: an input has another shape, layout, dtype or device than was planned for.
        """
        values = self._inputs.unboxed(args)
        meet(self, values, self._inputs.positions)
        with self._arena.lock:
            memory = self._arena.reserve(self.plan.arena_bytes)
            self._arena.wait()
            if self._run is None or memory is not self._bound_to:
                self.unbind()
                with torch.inference_mode(False), torch.no_grad():
                    self._code_run = self._run = self.code.bind(memory)
                self._bound_to = memory
                self._arena.bound.add(self)
                if self._graphs:
                    before, run = self._replay, self._code_run
                    self._run = self._replay = before.renewed(run) if before else Replay(run, self._inputs.positions)
            return self._run(*values)

    def begin(self, given: Sequence[torch.Tensor]) -> bool:
        """Start the graph before a call on these tensors; whether that was done. `end` must follow."""
        if self._replay is None or self._bound_to is not self._arena.memory:
            return False
        return self._arena.begin(self._replay, given)

    def end(self) -> bool:
        """Let others in; whether a call has taken what was begun."""
        return self._arena.end()

    def unbind(self) -> None:
        """Let go of the views of the arena, and of the graph."""
        if self._code_run is not None:
            self._code_run.__globals__.clear()  # where it is too, with the views of the arena: garbage would keep them
        if self._replay is not None:
            self._replay.release()
        self._run = self._bound_to = self._code_run = None
        self._arena.bound.discard(self)

    @property
    def held_bytes(self) -> int:
        """Bytes that are held between calls: the arena."""
        return self.plan.arena_bytes

    def release(self) -> None:
        """Give the arena and the graph back; the next call takes them again."""
        with self._arena.lock:
            self._arena.give_back()


# The timeline, the report and the bound function ask for the plan of one program; the search takes seconds.
_PLANS: WeakKeyDictionary[Program, tuple[BufferPlan, Mapping[str, Write | None]]] = WeakKeyDictionary()


def plan_for(program: Program) -> tuple[BufferPlan, Mapping[str, Write | None]]:
    """Where the program's values live, and by node name how each operator writes there (None: it does not)."""
    if program not in _PLANS:
        _PLANS[program] = _planned(program)
    return _PLANS[program]


def _planned(program: Program) -> tuple[BufferPlan, Mapping[str, Write | None]]:
    writes = {node.name: write_of(node) for node in program.calls}
    forms = {name: Form(into=False, slices=False) if write is None else write.form for name, write in writes.items()}
    forms |= {node.name: Form() for node in program.calls if is_joinable(node)}
    return plan_buffers(program, forms), writes


def timeline_of(plan: BufferPlan, workspace: Mapping[str, int], held: int = 0, *, arena: bool = True) -> Timeline:
    """The bytes that a call holds at each step: the arena, the results so far, and what operators take beside it.

    Args:
        plan: where everything lives.
        workspace: what operators take, by node name.
        held: bytes that are held besides all the time.
        arena: whether the arena is held as a whole; else what lives in it is taken and given back value by value.
    """
    apart = [block for block in plan.blocks if not arena or block.home is not Home.ARENA]
    always = held + (plan.arena_bytes if arena else 0)
    extra = tuple(workspace.get(name, 0) for name in plan.steps)
    live = tuple(
        always + extra[step] + sum(block.nbytes for block in apart if block.start <= step < block.end)
        for step in range(len(plan.steps))
    )
    peak = max(live, default=0)
    at = live.index(peak) if live else 0
    there = [(block.name, block.nbytes) for block in plan.blocks if block.start <= at < block.end]
    end = always + sum(block.nbytes for block in apart if block.end >= len(plan.steps))
    by_size = tuple(sorted(there, key=lambda item: -item[1]))
    return Timeline(plan.steps, live, extra, len(live), peak, by_size, end, 0)


def minimum_timeline(program: Program, workspace: Mapping[str, int] | None = None) -> Timeline:
    """The memory of a call where every operation writes where it is told, slices of what is put together included.

    Args:
        program: an inference program.
        workspace: what operations take beside, in bytes by node name.
    """
    return timeline_of(plan_buffers(program), workspace or {}, graph_bytes(program), arena=False)


def graph_bytes(program: Program) -> int:
    """Bytes that a CUDA graph of the program holds for itself: the caller's inputs and the results, once more."""
    if device_of(program).type != "cuda" or any(draws_numbers(node) for node in program.calls):
        return 0
    users = [n for n, e in zip(program.placeholders, program.inputs, strict=True) if e.kind is InputKind.USER]
    results = [value for value in program.output_nodes if isinstance(value, fx.Node)]
    tensors = [tensor for node in (*users, *results) for tensor in tensors_of(node)]
    return sum(allocated_bytes(tensor.untyped_storage().nbytes(), tensor.device) for tensor in tensors)


def device_of(program: Program) -> torch.device:
    """The device of the program's tensors: the first that is not the CPU, else the CPU."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")
