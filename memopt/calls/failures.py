"""What fails inside memopt, or inside torch's compiler for it: told from a model's own error, kept for a report.

Nobody's training should end because a graph could not be rewritten: without a budget the model then runs eagerly.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import tempfile
import traceback
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import fx

from memopt.budget import BudgetError
from memopt.calls.agreement import OtherRankError
from memopt.capture.export import CaptureError, NotCapturedError, NotTracedError
from memopt.common.cache_dir import cache_dir
from memopt.common.own_files import MEMOPT
from memopt.errors import first_line
from memopt.evidence import EvidenceError
from memopt.graph.propagation import ProgramError
from memopt.memory.allocator_events import MeasuringError
from memopt.options import Options
from memopt.pass_manager import PassError
from memopt.torch_compat.dynamo_errors import TorchDynamoException, TorchRuntimeError, place_in_model
from memopt.torch_compat.saved_tensors import is_from_hooks
from memopt.torch_compat.source_files import AROUND_CALLS, COMPILER
from memopt.torch_compat.versions import TRIED, untried

# Files whose frames lie around every call, or around the model's own code.
_CALLS = (
    "dynamo_settings",
    "guard_fast_path",
    "model_calls",
    "plan_ahead",
    "planned",
    "residents",
    "sessions",
    "several",
    "sizing",
    "tracing",
)
_AROUND = {os.path.join(MEMOPT, "calls", f"{name}.py") for name in _CALLS}
_AROUND |= {os.path.join(MEMOPT, *name.split("/")) for name in ("module.py", "common/one_piece.py")}
_AROUND |= {os.path.join(MEMOPT, "cuda_graphs", "speculative.py")}
_AROUND |= AROUND_CALLS

_SHARED = "clone() the input that shares memory with another, of which autograd knows otherwise, before the call"

# What autograd says of writes as a whole step is traced, though the model's loss may not use what they are to, and what
# to write instead.
_INSTEAD = {
    "modified by an inplace operation": "clone() what backward needs before it is written to",
    "has been modified inplace": "clone() the piece before it is written to",
    "refers to a single memory location": "clone() the input that shows an element many times (expand) before the call",
    "non-differentiable view input mutations": _SHARED,
    "any_leaf=": _SHARED,
    "a leaf Variable that requires grad is being used in an in-place operation": _SHARED,
}

# Engines that run part of what models do: what they raise themselves says what to do.
_LIMITED = ("static", "onnxruntime", "xla", "tensorflow")


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error from inside memopt, as text: an exception would keep graphs and tensors.

    Attributes:
        line: what failed.
        trace: the traceback.
        graph: the graph that was compiled; empty where none was.
        said: what failed, in words for the user.
        instead: what the user may write, where it is known that no graph can hold the model's code as it is.
        traced: what the model's own code raises as it is traced, and where; empty where that is not what failed.
    """

    line: str
    trace: str
    graph: str
    said: str
    instead: str = ""
    traced: str = ""

    def not_captured(self, model_name: str) -> NotCapturedError:
        """What says so of a model that raises nothing by itself: code may do other things as it is traced."""
        why = f"{self.traced}, which it does not by itself"
        return NotCapturedError(f"no graph could be captured of {model_name}: {why}")

    def save(self, model_name: str, options: Options) -> str:
        """Write what a report of the failure needs; return where, how to have it written, or what to do instead."""
        if self.instead:
            return self.instead
        folder = cache_dir()
        if folder is None:
            return "set MEMOPT_CACHE_DIR to have its traceback and graph written"
        engine, budget = type(options.engine).__name__, "none" if options.budget is None else options.budget.text
        text = (
            f"{self.line}\nmodel {model_name}, engine {engine}, budget {budget}, torch {torch.__version__}, "
            f"Python {platform.python_version()}, {platform.platform()}\n\n{self.trace}\n{self.graph}\n"
        )
        try:
            (folder / "failures").mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(".txt", f"{model_name}-", folder / "failures")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            return f"its traceback could not be written: {first_line(error)}"
        version = untried()
        other = f", or take a torch that memopt was tried on ({', '.join(TRIED)}; this is {version})" if version else ""
        return f"please report it with {path}{other}"


def failure_of(error: Exception, options: Options) -> Failure | None:
    """What failed inside memopt; None if the error is for the user: of the model's own, or a refusal in a line.

    Args:
        error: raised by a call that was captured, planned, lowered or run.
        options: of the compilation.
    """
    if isinstance(error, NotTracedError) and options.budget is None:
        said, _, instead = str(error).rpartition(": ")
        return Failure(said, "".join(traceback.format_exception(error)), "", said, instead)
    if isinstance(error, CaptureError | BudgetError | MemoryError | EvidenceError | MeasuringError | OtherRankError):
        return None
    if is_from_hooks(error):
        return None
    if isinstance(error, PassError) and (options.passes is not None or not _is_crash(error)):
        return None
    home = type(options.engine).__module__
    if not home.startswith("memopt."):
        return None  # a user's own engine
    files = list(_files(error.__traceback__))
    limited = home.rpartition(".")[2] in _LIMITED
    if limited and isinstance(error, RuntimeError | ValueError) and files and files[-1].startswith(MEMOPT):
        return None
    if not isinstance(error.__cause__, TorchDynamoException) and not any(map(_is_inside, files)):
        return None
    trace = "".join(traceback.format_exception(error))
    instead = next((way for words, way in _INSTEAD.items() if words in str(error)), "")
    line = first_line(error).partition(". ")[0].partition(" Hint:")[0]  # of autograd's, without its advice
    line = line if instead else f"{type(error).__name__}: {first_line(error)}"
    said = f"no graph can hold what it writes: {line}" if instead else f"memopt failed ({line})"
    traced = _traced(error.__cause__, line) if isinstance(error.__cause__, TorchRuntimeError) else ""
    return Failure(line, trace, getattr(error, _GRAPH, ""), said, instead, "" if instead else traced)


def _traced(error: TorchRuntimeError, line: str) -> str:
    place = place_in_model(error)
    return f"traced, it raises {line}{f' at {place}' if place else ''}"


_GRAPH = "_memopt_graph"


def note_graph(error: Exception, graph_module: fx.GraphModule) -> None:
    """Keep with an error the graph that was compiled when it was raised."""
    if not hasattr(error, _GRAPH):
        setattr(error, _GRAPH, graph_module.print_readable(print_output=False))


def _is_crash(error: PassError) -> bool:
    """Whether the pass itself failed, and not its result the specification or its proof."""
    return error.__cause__ is not None and not isinstance(error.__cause__, ProgramError | EvidenceError)


def _files(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        yield os.path.abspath(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next


def _is_inside(file: str) -> bool:
    return file not in _AROUND and (file.startswith(MEMOPT) or file.startswith(COMPILER))
