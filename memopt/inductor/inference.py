"""Inference programs as Inductor code that reads weights where they lie, on CUDA as one CUDA graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.backends.aten import Boxed
from memopt.backends.chunked import ChunkedCode, NotInPieces, is_chunked
from memopt.backends.cuda_graph import Replay
from memopt.backends.eager_epilogue import split_epilogue
from memopt.backends.fused_convolution import Worth, find_fusions, fuse_convolutions, read_by
from memopt.backends.inputs import UserInputs
from memopt.backends.joined_products import join_products, read_by_products
from memopt.backends.static import Arena, device_of
from memopt.common.phases import phase
from memopt.cuda_graphs.speculative import meet
from memopt.graph.weights import only
from memopt.inductor.edits import edits
from memopt.inductor.operator_layout import as_operators_lie
from memopt.inductor.own_memory import note_memory
from memopt.inductor.padding import product_settings
from memopt.inductor.strided_views import copy_bases
from memopt.program import InputKind, Program, draws_numbers
from memopt.step.planned import fingerprint
from memopt.torch_compat.aot_autograd import aot_settings
from memopt.torch_compat.boxed import boxed
from memopt.torch_compat.fake_tensors import no_fake_mode
from memopt.torch_compat.inductor_compile import compile_graph, compile_traced
from memopt.torch_compat.inductor_errors import InductorError
from memopt.torch_compat.tracing_context import out_of_trace

aten = torch.ops.aten

_WORTH = Worth()
_ALIGNED = 16  # bytes
# A product of odd columns by a kernel of Triton's, which writes them where they belong.
_UNPADDED = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON", "shape_padding": False}


class InductorFunction:
    """A program as Inductor code: takes the values of all inputs but constants in a list, which it empties.

    Parameters and buffers are arguments, read where the model keeps them: nothing is held twice. On CUDA all kernels
    are one graph, but for large results (see `memopt.backends.eager_epilogue`). Calls from several threads take turns.
    """

    def __init__(self, program: Program, turns: Arena) -> None:
        """Generate and compile the code; memory is taken at the first call.

        Args:
            program: an inference program.
            turns: what programs that share memory take turns with.
        """
        boxed(self)
        self._turns, self._inputs = turns, UserInputs(program)
        self._replay: Replay | None = None
        self._reason = _reason_against(program, turns.device)
        self._split = None if self._reason else split_epilogue(program, _compiled_module)
        self._head = program if self._split is None else self._split.head
        self._constants = _constants_of(self._head)
        with phase("compiling kernels"):
            self._code = _code_of(self._head)
        if not self._reason:
            finish = None if self._split is None else self._split.finish
            self._replay = Replay(self._run, self._inputs.positions, finish=finish)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run.

        Raises:
            TypeError: there are more or fewer values than inputs.
            ValueError: an input has another shape, layout, dtype or device than was compiled for.
        """
        values = self._inputs.unboxed(args)
        if self._replay is None:
            return self._run(*values)
        meet(self, values, self._inputs.positions)
        with self._turns.lock:
            self._turns.wait()
            return self._replay(*values)

    @property
    def no_graph(self) -> str:
        """Why no CUDA graph is used; empty where one is, or may be."""
        return self._reason if self._replay is None else self._replay.impossible

    @property
    def missing_bytes(self) -> int | None:
        """Bytes that the next call takes and keeps: 0 where it has them, or keeps none; None where it is not known."""
        return 0 if self._replay is None else self._replay.missing_bytes

    def begin(self, given: Sequence[torch.Tensor]) -> bool:
        """Start the graph before a call on these tensors; whether that was done. `end` must follow."""
        return self._replay is not None and self._turns.begin(self._replay, given)

    def end(self) -> bool:
        """Let others in; whether a call has taken what was begun."""
        return self._turns.end()

    def _run(self, *values: Any) -> Sequence[Any]:
        if not self._constants:
            return self._code(*values)
        given = list(values)
        for index, value in self._constants:
            given.insert(index, value)
        return self._code(*given)

    def rebind(self, program: Program) -> None:
        """Take the constants of a program that is equal but for them; nothing is compiled."""
        with self._turns.lock:
            names = {entry.name for entry in self._head.inputs}
            self._head = dataclasses.replace(self._head, state=only(program.state, names))
            self._constants = _constants_of(self._head)
            if self._split is not None:
                self._split.constants.update({name: program.state[name] for name in self._split.constants})
            self.release()

    def release(self) -> None:
        """Give back what is held between calls; the next call takes it again."""
        if self._replay is not None:
            self._replay.release()


def _constants_of(program: Program) -> list[tuple[int, torch.Tensor]]:
    """A program's constants, with their positions among its inputs, in order."""
    constants = [(index, item) for index, item in enumerate(program.inputs) if item.kind is InputKind.CONSTANT]
    return [(index, program.state[item.name]) for index, item in constants]


class InductorInference:
    """Makes the functions of one graph: for new weights that were folded, the code of the last one serves again."""

    def __init__(self, *, libraries: bool = True) -> None:
        """Make an engine.

        Args:
            libraries: use what cuDNN and cuBLAS fuse; without, the graph as it is.
        """
        self._libraries = libraries
        self._last: tuple[str, InductorFunction] | None = None

    def bind(self, program: Program) -> InductorFunction:
        """The function of a program, from code that was made for an equal one where there is such code."""
        with no_fake_mode(), torch.no_grad():
            program = _for_device(program) if self._libraries else program
            key = fingerprint(program)
            if self._last is not None and self._last[0] == key:
                self._last[1].rebind(program)
            else:
                self._last = None  # not two of them at a time
                self._last = key, InductorFunction(program, Arena(device_of(program)))
            return self._last[1]


def _for_device(program: Program) -> Program:
    """The program as the device's libraries run it fastest."""
    if device_of(program).type != "cuda":
        return program
    with phase("timing kernels"):
        fused = fuse_convolutions(program, _WORTH)
    return join_products(fused)


def uses_libraries(program: Program) -> bool:
    """Whether the program is rewritten for its device's libraries."""
    on_gpu = device_of(program).type == "cuda"
    return on_gpu and bool(read_by(program) or find_fusions(program) or read_by_products(program))


def watching(program: Program) -> Program:
    """The program, which names the inputs whose present values its code will hold."""
    if device_of(program).type != "cuda":
        return program
    return dataclasses.replace(program, baked=program.baked | read_by(program) | read_by_products(program))


def _code_of(program: Program) -> Callable[..., Sequence[Any]]:
    """The program's code; in pieces where it runs in chunks."""
    if is_chunked(program):
        with contextlib.suppress(NotInPieces):
            return ChunkedCode(program, _lowered_boxed)
    return _lowered(program.copy().graph_module)


def _reason_against(program: Program, device: torch.device) -> str:
    if device.type != "cuda":
        return "there is none on this device"
    if any(draws_numbers(node) for node in program.calls):
        return "the program draws random numbers"
    return ""


def _compiled_module(module: fx.GraphModule) -> Boxed:
    """The function of the calls that make a large result."""
    try:
        run = _lowered(module, _UNPADDED if _has_odd_columns(module) else {})
    except (InductorError, RuntimeError):  # no such kernel, or no memory to try it in
        run = _lowered(module)
    return lambda args: run(*args)


def _has_odd_columns(module: fx.GraphModule) -> bool:
    """Whether a product on CUDA has rows that libraries write slowly: padded ones would take another copy of it."""
    made = [node.meta["val"] for node in module.graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]
    return any(value.is_cuda and value.shape[-1] * value.element_size() % _ALIGNED for value in made)


def _lowered_boxed(module: fx.GraphModule) -> Boxed:
    """The code of a functional graph, which may write to its last inputs, without what AOTAutograd puts around it.

    Called so, it lets go of its inputs while it runs. That holds where it takes and returns what the graph does; else
    the whole is taken.
    """
    inner: list[tuple[fx.GraphModule, Boxed]] = []

    def compile_inner(traced: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        compiled: Any = compile_traced(traced, inputs, **options)
        inner.append((traced, compiled))
        return compiled

    taken, returned = _ends(module)
    with aot_settings(enable_autograd_cache=False):  # a function that is found there comes as a whole
        whole = _lowered(module, inner_compile=compile_inner)
    if len(inner) == 1 and _ends(inner[0][0]) == (taken, returned):
        return inner[0][1]
    return lambda args: whole(*args)


def _ends(module: fx.GraphModule) -> tuple[int, int]:
    """How many inputs and outputs a graph has."""
    inputs = sum(node.op == "placeholder" for node in module.graph.nodes)
    return inputs, len(module.graph.output_node().args[0])  # type: ignore[arg-type]


def _edit_first(graph: fx.Graph) -> None:
    note_memory(graph)
    copy_bases(graph)


def _lowered(
    module: fx.GraphModule,
    settings: Mapping[str, Any] | None = None,
    inner_compile: Callable[..., Any] = compile_traced,
) -> Callable[..., Sequence[Any]]:
    module = as_operators_lie(module)
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with out_of_trace(), torch.no_grad():
        patches = {**product_settings(module), **(settings or {}), **edits(_edit_first)}
        compiled: Any = compile_graph(module, inputs, inner_compile, patches)
    return compiled  # type: ignore[no-any-return]
