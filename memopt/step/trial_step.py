"""A step of compiled code, taken for real and let go of: what it takes of the device, or what it lacks."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from memopt.capture.real_arguments import position_of
from memopt.common.garbage import collect
from memopt.graph.synthesis import same_random_state
from memopt.host.buffers import release
from memopt.memory.allocator import allocated_after_gc, retries_of
from memopt.memory.allocator_limit import held_bytes, lifted
from memopt.program import OutputKind, Program
from memopt.torch_compat.fake_tensors import no_fake_mode
from memopt.torch_compat.tracing_context import out_of_trace

# Steps that are taken: the first one chooses kernels, and takes more for it than later ones. Under the limit some more:
# where blocks lie changes from one step to the next.
_STEPS, _HELD_STEPS = 2, 4


@dataclasses.dataclass(frozen=True)
class TrialMemory:
    """What a step took of the device.

    Attributes:
        allocated_bytes: the most bytes of tensors at any moment, all that is there included.
        reserved_bytes: the most bytes that the allocator held, nothing that was cached before included.
        before_bytes: bytes of tensors when the step began.
        kept_bytes: bytes that the first step left behind: buffers of libraries.
        retries: how often the allocator handed back what it cached, to take other memory, once steps were warm.
    """

    allocated_bytes: int
    reserved_bytes: int
    before_bytes: int
    kept_bytes: int = 0
    retries: int = 0


@dataclasses.dataclass(frozen=True)
class Short:
    """A step during which memory ran out.

    Attributes:
        missing_bytes: what the allocator would have held beyond its limit; 0 where that is not known.
        others: whether other processes held so much that the device had less than the limit.
    """

    missing_bytes: int = 0
    others: bool = False


def mutated(program: Program) -> frozenset[int] | None:
    """Which arguments of a captured graph the step writes to, by position; None where that is not known."""
    places = {node.name: position_of(node) for node in program.placeholders}
    found = {places.get(out.target or "") for out in program.outputs if out.kind is OutputKind.MUTATION}
    return None if None in found else frozenset(place for place in found if place is not None)


def take_step(
    run: Callable[..., Any],
    given: Sequence[Any],
    written: Collection[int],
    device: torch.device,
    *,
    dropped: Collection[int] = (),
    held: bool = False,
) -> TrialMemory | Short:
    """Run forward and backward of a compiled graph and let go of all that came of it.

    Nothing of the caller's changes: arguments that the step writes to are copies, gradients are returned rather than
    accumulated, and random states are put back.

    Args:
        run: the compiled graph.
        given: its arguments.
        written: positions of the arguments that it writes to.
        device: the CUDA device that is watched.
        dropped: positions of those whose gradients are dropped within backward.
        held: whether the allocator's limit is in force, and its cache kept from one step to the next, as in the
            caller's own steps. Else the limit is lifted, so that what the allocator would reserve is seen.

    Returns:
        What the last step took, or what it lacked.
    """
    short = Short()
    limit = contextlib.nullcontext() if held else lifted(device)
    with no_fake_mode(), out_of_trace(), same_random_state(given), limit:
        try:
            first = allocated_after_gc(device)
            for _ in range(_HELD_STEPS if held else _STEPS):
                torch.cuda.synchronize(device)
                if not held:
                    torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
                before, retried = torch.cuda.memory_allocated(device), retries_of(device)
                results_of(run, given, written, dropped)
                torch.cuda.synchronize(device)
            peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            return TrialMemory(*peaks, before, _left(device, first, before), retries_of(device) - retried)
        except (torch.OutOfMemoryError, MemoryError) as error:
            # Its traceback holds the step's tensors until this clause is left.
            short = lacked(error, device, held)
            release()  # what was on its way back from the host
        finally:
            torch.cuda.empty_cache()
    return short


_ASKED = re.compile(r"Tried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def lacked(error: Exception, device: torch.device, held: bool) -> Short:
    """What a step lacked, asked while its tensors are still there: what was cached, the allocator has handed back."""
    if device.type != "cuda":
        return Short()
    limit = held_bytes(device) or 0
    if is_short(device, limit):
        return Short(others=True)
    asked = _ASKED.search(str(error))
    if asked is None or not held or not limit:
        return Short()
    wanted = int(float(asked[1]) * _UNITS[asked[2]])
    return Short(max(0, torch.cuda.memory_reserved(device) + wanted - limit))


def _left(device: torch.device, first: int, second: int) -> int:
    """What the first of two steps left behind and garbage is not, from what was allocated before each."""
    if second <= first:
        return 0
    collect()
    return max(0, min(second, torch.cuda.memory_allocated(device)) - first)


def results_of(
    run: Callable[..., Any], given: Sequence[Any], written: Collection[int], dropped: Collection[int] = ()
) -> list[Any]:
    """Forward's results and the gradients of one step of a compiled graph, with tangents of ones.

    Backward begins at single numbers where there are any, as it does in a loop with a loss: what stands in for other
    tangents is made within it then, and gone once it was read. Tangents that are given are held to its end.

    Args:
        run: the compiled graph.
        given: its arguments; hooks and gradients of these see nothing.
        written: positions of those that it is to write to copies of.
        dropped: positions of those whose gradients are dropped as soon as they are there: None stands for them.
    """
    arguments = [_own(value, index in written) for index, value in enumerate(given)]
    wanted = [value for value in arguments if isinstance(value, torch.Tensor) and value.requires_grad]
    with torch.enable_grad():
        results = run(*arguments)
        made = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
        gradients: Sequence[Any] = ()
        made = [value for value in made if value.numel() == 1] or made
        if made and wanted:
            ones = [torch.ones_like(value) for value in made]
            if dropped:
                for value in (arguments[index] for index in dropped):
                    value.register_post_accumulate_grad_hook(_drop)
                torch.autograd.backward(made, ones, inputs=wanted)
                gradients = [value.grad for value in wanted]
            else:
                gradients = torch.autograd.grad(made, wanted, ones, allow_unused=True)
    return [*(value.detach() if isinstance(value, torch.Tensor) else value for value in results), *gradients]


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _own(value: Any, copied: bool) -> Any:
    """A tensor that hooks and gradients of the caller's do not see; what is written to has memory of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    own = value.detach()
    if copied:
        own = own.clone(memory_format=torch.preserve_format)
    return own.requires_grad_(value.requires_grad)


def is_short(device: torch.device, allowed: int) -> bool:
    """Whether other processes hold so much that the device has less than may be held here."""
    if device.type != "cuda":
        return False
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) < allowed
