"""Backward's code, generated in a process of its own while forward's is generated in this one.

Inductor's code generation is Python, one graph after the other. A copy of this process goes on where AOTAutograd would
with forward lowered, and ends once backward is: its code lies in Inductor's cache on disk then, where this process
finds it when it comes to backward, by the same key as any other. What the copy does is never trusted: where it fails,
where it lasts too long, or where it lowered another backward, backward is lowered here.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.common.cores import cores
from memopt.errors import first_line
from memopt.graph.fake_calls import library_settings
from memopt.inductor.kernel_sources import KernelSources
from memopt.torch_compat.forked import (
    before_code,
    known_beforehand,
    libraries_asked_through,
    result_strides,
    stand_alone,
)
from memopt.torch_compat.inductor_settings import caches_code, compiles_alone

log = logging.getLogger("memopt")

# Code of fewer nodes is generated before the copy would be worth its start.
_FEW = 80
# A copy is given up when it takes so many times what forward took, and so many seconds.
_PATIENCE, _START = 4.0, 10.0
_LOOK = 0.01  # seconds between two looks at it


class BegunError(BaseException):
    """Ends what only the first process goes on with; no handler of errors is for it."""

    def __init__(self, strides: list[tuple[int, ...] | None]) -> None:
        """Take the strides of forward's results; None for what is no tensor."""
        super().__init__()
        self.strides = strides


class ForkedCodegen:
    """At most one copy of this process, which generates the code of one backward.

    Attributes:
        inside: whether this process is the copy.
    """

    # Whether a copy failed: the next would, too, where it waits for a lock, or makes code that no cache holds.
    _fails = False
    # Of the libraries of a GPU, which a copy cannot ask: what was traced once is not asked for again.
    _answers: ClassVar[dict[Any, Any]] = {}

    def __init__(self) -> None:
        """Nothing is begun yet."""
        self.inside = False
        self._child: int | None = None
        self._began = 0.0
        self._may = False
        self._missed = False
        self._kernels: KernelSources | None = None  # of the copy

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """What may begin a copy: it never leaves this block, and does not outlive it."""
        self._may = True
        try:
            with libraries_asked_through(self._remembering):
                yield
        except Exception as error:
            if self.inside:
                cause = _first_of(error)  # torch names shapes where it was kept from asking the device, say
                log.info("backward's code cannot be generated ahead: %s: %s", type(cause).__name__, first_line(cause))
                log.debug("where that was", exc_info=cause)
            raise
        finally:
            self._may = False
            if self.inside:
                os._exit(1)
            self._stop()

    def begin(self, module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Begin a copy where one is worth it; whether this process is the copy.

        Args:
            module: forward, as it is to be lowered.
            inputs: its arguments, fake tensors among them.
        """
        if not self._may or self._missed or ForkedCodegen._fails or not _is_worth(module):
            return False
        devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        known = known_beforehand(devices)
        self._began = time.monotonic()
        try:
            self._kernels = KernelSources()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's and JAX's, of threads: what the copy does needs none
                child = os.fork()  # noqa: TID251
        except OSError:  # too many processes, memory that may not be promised twice, or no room for a file
            ForkedCodegen._fails = True
            return False
        if child:
            self._child = child
            return False
        self.inside = True
        gc.disable()  # garbage may hold what only the first process can let go of
        stand_alone(known)
        self._kernels.tell()
        return True

    @contextlib.contextmanager
    def once_laid_out(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
        """While forward is lowered in the block, begin a copy as soon as it is known how what forward saves lies.

        Raises:
            BegunError: this process is the copy.
        """

        def begin(is_backward: bool, graph: Any) -> None:
            if not is_backward and self.begin(module, inputs):
                raise BegunError(result_strides(graph))

        with before_code(begin):
            yield

    @property
    def running(self) -> bool:
        """Whether a copy was begun, and not waited for."""
        return self._child is not None

    def leave(self) -> None:
        """End this process, the copy, whose work is done."""
        os._exit(0)

    def wait(self) -> bool:
        """Wait until the copy has ended; whether it said that backward's code lies in the cache."""
        if self._child is None:
            return False
        until = time.monotonic() + _START + _PATIENCE * (time.monotonic() - self._began)
        while time.monotonic() < until:
            self.listen()
            try:
                ended, status = os.waitpid(self._child, os.WNOHANG)
            except ChildProcessError:  # someone else waits for every process that ends: what it said is lost
                ended, status = self._child, 0
            if ended:
                self.listen()
                self._child = None
                self._hear_no_more()
                ForkedCodegen._fails = status != 0
                return status == 0
            time.sleep(_LOOK)
        ForkedCodegen._fails = True
        self._stop()
        return False

    def listen(self) -> None:
        """Have those of the copy's kernels compiled that are there by now."""
        if self._kernels is not None:
            self._kernels.listen()

    def missed(self) -> None:
        """Learn that the copy's code was not found: it was made for another backward."""
        self._missed = True

    def _remembering(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A function of torch's, whose answers are remembered: tracing the joint graph asks all that the copy will."""

        def answer(*args: Any, **options: Any) -> Any:
            asked = name, library_settings(), _frozen(args), _frozen(tuple(options.items()))
            try:
                hash(asked)
            except TypeError:  # of sizes that are symbols, for whose convolutions there is no copy
                return plain(*args, **options)
            if asked not in self._answers:
                self._answers[asked] = plain(*args, **options)
            return self._answers[asked]

        return answer

    def _stop(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._child, signal.SIGKILL)
                os.waitpid(self._child, 0)
            self._child = None
        self._hear_no_more()

    def _hear_no_more(self) -> None:
        if self._kernels is not None:
            self._kernels.close()
            self._kernels = None


def lays_out(module: fx.GraphModule) -> bool:
    """Whether Inductor may lay out values of a graph otherwise than they were traced, for the sake of convolutions."""
    return bool(module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default))


def _first_of(error: BaseException) -> BaseException:
    """The error that all the others come of."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _is_worth(module: fx.GraphModule) -> bool:
    if sys.platform != "linux" or cores() < 2:
        return False
    if compiles_alone() or not caches_code():  # who sets TORCHINDUCTOR_COMPILE_THREADS=1 wants a single process
        return False
    return len(module.graph.nodes) >= _FEW
