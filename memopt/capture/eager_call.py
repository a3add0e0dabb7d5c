"""What a call of a model takes as PyTorch itself runs it, counted on fake tensors."""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from memopt.capture.eager_step import roots_of, start_of
from memopt.capture.export import NotCapturedError
from memopt.capture.shadow import Shadow
from memopt.common.quiet import quiet
from memopt.common.random_streams import host_state, streams_kept
from memopt.errors import first_line
from memopt.memory.attributes import held_tensors
from memopt.memory.cost.table import CostTable
from memopt.memory.reach import plain_tensors, shown_tensors
from memopt.memory.rounding import allocated_bytes
from memopt.memory.step_ledger import Part, StepLedger
from memopt.step.graph_peaks import GraphPeaks
from memopt.torch_compat import pytree
from memopt.torch_compat.packed_sequences import Unpacking
from memopt.torch_compat.saved_tensors import saved_as_it_is
from memopt.torch_compat.storages import id_of_storage

# Arguments that a run on fake tensors shows whole; others may hold tensors that are not counted, and be written to.
SHOWN = (
    torch.Tensor, bool, int, float, complex, str, bytes, slice, enum.Enum, type(None), torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip

log = logging.getLogger("memopt")


@dataclasses.dataclass(frozen=True)
class EagerCall:
    """A call as PyTorch itself runs it.

    Attributes:
        peaks: in bytes above parameters, buffers, arguments and gradients that exist.
        kept: bytes of the tensors that the model's modules hold afterwards, beside parameters and buffers.
        made: of these, what the call has made: the peaks are those of the next call, which finds it and makes it anew.
        by_values: whether the model has looked at values of tensors, or at random numbers of Python's or NumPy's:
            with others it may take another way.
        by_chance: whether those values go by random numbers of torch's: a real run may take another way.
    """

    peaks: GraphPeaks
    kept: int
    made: int
    by_values: bool
    by_chance: bool


def eager_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    table: CostTable | None,
    *,
    backward: bool = True,
    tangents_stay: bool = False,
    around: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
    renews: bool = False,
) -> EagerCall | None:
    """What a call of the model makes as PyTorch itself runs it, with the user's checkpoints, on fake tensors.

    Gradients that exist are added to. Neither the model nor its inputs change; objects that modules hold as attributes
    are the twin's, too.

    Args:
        model: that is called.
        args, kwargs: of the call.
        table: what operators need while they run, which may be more than they need; None leaves it out.
        backward: whether a backward from its outputs follows.
        tangents_stay: whether the outputs' gradients are held all through that; else until autograd has used them.
        around: what is in force while the model's twin, which it is given, runs forward.
        renews: whether such a call is known to find what an earlier one has made; found out where nothing is `around`.

    Returns:
        What it was seen to take; None where the model cannot run on fake tensors.
    """
    try:
        shadow = Shadow(model)
        fake_args, fake_kwargs = shadow.inputs(args, kwargs)
    except (NotCapturedError, NotImplementedError) as error:
        log.info("what eager takes is not known: %s", first_line(error))
        return None
    tensors = [*shadow.model.parameters(), *pytree.tree_leaves((fake_args, fake_kwargs))]
    devices = [tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)]
    ledger = StepLedger(devices[0] if devices else torch.device("cpu"))
    try:
        with (
            quiet(),
            saved_as_it_is(),
            shadow.running(),
            ledger,
            Unpacking(),
            streams_kept(),
            torch.set_grad_enabled(backward),
        ):
            drawn = host_state()
            for twin, parameter in zip(shadow.model.parameters(), model.parameters(), strict=True):
                if parameter.grad is not None:
                    with ledger.ignoring():
                        twin.grad = torch.empty_like(twin)
            there = _storages(held_tensors(shadow.model))  # alive here, so that no other storage has their place
            absent = [twin for twin in shadow.model.parameters() if twin.grad is None]

            def step(within: AbstractContextManager[Any]) -> tuple[Part, int, Part, int] | None:
                with within:
                    outputs = shown_tensors(shadow.model(*fake_args, **fake_kwargs))
                forward, saved = ledger.part(), ledger.live
                if shadow.mode.strays:  # a forward that was set by hand may be the model's own, not its twin's
                    return None
                if backward:
                    _run_backward(roots_of(outputs), ledger, tangents_stay)
                return forward, saved, ledger.part(), ledger.live

            whole = nullcontext() if around is None else around(shadow.model)
            seen = step(nullcontext() if renews else whole)
            held = _storages(held_tensors(shadow.model))
            kept, fresh = (
                sum(allocated_bytes(storage.nbytes(), ledger.device) for storage in storages)
                for storages in (held.values(), [held[place] for place in held.keys() - there.keys()])
            )
            held.clear()
            made = fresh if around is None or renews else 0
            if seen is not None and made:
                for twin in absent:
                    twin.grad = None
                ledger.part()
                seen = step(whole)
            if seen is None:
                return None
            forward, saved, back, left = seen
            by_values = shadow.mode.answered or host_state() != drawn
        gradients = [
            (name, allocated_bytes(twin.grad.untyped_storage().nbytes(), ledger.device))
            for (name, twin), parameter in zip(shadow.model.named_parameters(), model.parameters(), strict=True)
            if twin.grad is not None and parameter.grad is None
        ]
        peaks = GraphPeaks(forward.with_scratch(table), back.with_scratch(table), saved, left, tuple(gradients))
        return EagerCall(peaks, kept, made, by_values, shadow.mode.by_chance)
    except Exception as error:  # whatever the user's operators do on fake tensors
        log.info("what eager takes is not known: %s", first_line(error))
        return None


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages of tensors, by identity."""
    found = (plain.untyped_storage() for tensor in tensors for plain in plain_tensors(tensor))
    return {id_of_storage(storage): storage for storage in found}


def _run_backward(roots: Sequence[torch.Tensor], ledger: StepLedger, tangents_stay: bool) -> None:
    """Backward from these outputs; their own gradients live until autograd has used them, as those of a loss do."""
    if not roots:
        return
    if tangents_stay:
        start, tangents = list(roots), [torch.ones_like(root) for root in roots]
    else:
        start, tangents = start_of(roots, ledger)
    torch.autograd.backward(start, tangents)
