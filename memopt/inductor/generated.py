"""A graph's generated code: what it says is known at once, its kernels are loaded only when they are to run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memopt.backends.hand_over import Generate
from memopt.cuda_graphs.pool import GraphPool
from memopt.cuda_graphs.signature import StepSignature
from memopt.cuda_graphs.steered_code import FIRST, SteeredCode
from memopt.cuda_graphs.step import CudaGraphStep
from memopt.inductor.lines import with_lines
from memopt.inductor.loading import Call, stand_in
from memopt.inductor.pieces import Pieces, generator_of
from memopt.inductor.replay import Wrapper
from memopt.memory.allocator_limit import limit_available_bytes
from memopt.torch_compat.backward import keeps_graph
from memopt.torch_compat.fake_tensors import no_fake_mode
from memopt.torch_compat.kernel_timing import flush_within

_ARGUMENTS = re.compile(r"^ +((?:\w+, )*\w+),? = args$", re.MULTILINE)
_REUSED = re.compile(r"\bdel (\w+) +# reuse")


class GeneratedCode:
    """One graph's code.

    Attributes:
        around: put around what runs.
        wrapper: the code; None as long as there is none.
        overwrites: positions of the arguments that it writes its own values to; None: these are not known.
        instead: what runs in place of it.
        pieces: the code that gives some of its results before it ends, where there is such.
    """

    def __init__(self, around: Callable[[Call], Call] = lambda call: call) -> None:
        """There is no code yet."""
        self.around = around
        self.wrapper: Wrapper | None = None
        self.overwrites: Sequence[int] | None = ()
        self.instead: Call | None = None
        self.pieces: Pieces | None = None
        self._load: Callable[[], ModuleType] | None = None
        self._module: ModuleType | None = None
        self._generator: Generate | None = None

    def defer(self, load: Callable[[], ModuleType], path: str, attributes: Mapping[str, Any]) -> Any:
        """Take the code, to be loaded later; see `memopt.inductor.loading.loaded_by`."""
        self.wrapper = Wrapper(Path(path).read_text(), dict(attributes))
        self.overwrites = overwritten_arguments(self.wrapper.source)
        self._load, self._module, self._generator = load, None, None
        return stand_in(self.around(self._run), path)

    def load(self) -> ModuleType | None:
        """The generated module, kernels and all; None where there is no code."""
        if self._module is None and self._load is not None:
            flush_within(limit_available_bytes)
            with no_fake_mode():
                self._module = self._load()
        return self._module

    def generate(self, args: list[Any], give: Callable[[int, Sequence[Any]], None]) -> Iterator[None]:
        """The generator of one run of the pieces: see `memopt.backends.hand_over`."""
        if self._generator is None:
            module = self.load()
            assert module is not None and self.pieces is not None
            self._generator = generator_of(self.pieces, module)
        return self._generator(args, give)

    def _run(self, args: list[Any]) -> Sequence[Any]:
        module = self._module or self.load()
        assert module is not None
        if self.overwrites != () and keeps_graph():  # another backward reads them
            for index in range(len(args)) if self.overwrites is None else self.overwrites:
                args[index] = _copy(args[index])
        return (self.instead or module.call)(args)


def overwritten_arguments(source: str) -> tuple[int, ...] | None:
    """Positions of the arguments whose memory generated code uses for values of its own: saved tensors, in backward.

    None where the code is of a form that is not known.
    """
    found = _ARGUMENTS.search(source)
    if found is None:
        return None
    reused = set(_REUSED.findall(source))
    return tuple(index for index, name in enumerate(found[1].split(", ")) if name in reused)


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copied = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copied.copy_(value)


def cuda_graph_step(
    forward: GeneratedCode, backward: GeneratedCode, signature: StepSignature, pool: GraphPool
) -> CudaGraphStep | None:
    """Both graphs, loaded, as a step that may be captured, and runs as they do until it is started.

    Args:
        forward, backward: the code of both.
        signature: arguments and results of both graphs.
        pool: where they would be captured.

    Returns:
        The step, by which both graphs run from now on; None where a graph has no code.
    """
    first, second = forward.load(), backward.load()
    if first is None or second is None:
        return None
    make_steered = functools.partial(_steered, (forward.wrapper, first), (backward.wrapper, second))
    step = CudaGraphStep(first.call, second.call, signature, pool, make_steered)
    forward.instead, backward.instead = step.forward, step.backward
    return step


def _steered(
    forward: tuple[Wrapper | None, ModuleType], backward: tuple[Wrapper | None, ModuleType]
) -> SteeredCode | None:
    """Code that does the same as each module's, and tells its lines; None where it cannot."""
    steered = SteeredCode()
    if forward[0] is None or backward[0] is None:
        return None
    first = with_lines(forward[0].source, forward[1], steered.before, FIRST)
    second = None if first is None else with_lines(backward[0].source, backward[1], steered.before, first[1])
    if first is None or second is None:
        return None
    steered.set_code(first[0], second[0])
    return steered
