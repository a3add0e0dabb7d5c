"""What PyTorch itself holds in one captured graph, run operator by operator with the user's own checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from memopt.errors import first_line
from memopt.memory.cost.table import CostTable
from memopt.memory.step_ledger import Part, StepLedger
from memopt.program import OutputKind, Program
from memopt.step.graph_peaks import GraphPeaks
from memopt.torch_compat import pytree
from memopt.torch_compat.fake_tensors import FakeTensor, FakeTensorMode, no_fake_mode
from memopt.torch_compat.transforms import transforms_left

log = logging.getLogger("memopt")

_CHECKPOINT = "tag_activation_checkpoint"  # what Dynamo makes of torch.utils.checkpoint


def has_checkpoints(graph_module: fx.GraphModule) -> bool:
    """Whether the user's model checkpoints some of what this graph of Dynamo's computes."""
    modules = (module for module in graph_module.modules() if isinstance(module, fx.GraphModule))
    return any(str(node.target) == _CHECKPOINT for module in modules for node in module.graph.nodes)


def written_in_checkpoints(program: Program, *, around: bool = False) -> list[str]:
    """The buffers that a joint program writes to within the user's checkpoints: eager does so again in backward.

    Args:
        program: the step.
        around: whether a checkpoint is around all of it.
    """
    called = {entry.name: entry.target or entry.name for entry in program.inputs}
    return [
        called[output.target]
        for output, node in zip(program.outputs, program.output_nodes, strict=True)
        if output.kind is OutputKind.MUTATION
        and output.target in called
        and (around or node.meta.get("recompute") is not None)
    ]


@dataclasses.dataclass(frozen=True)
class EagerStep:
    """What PyTorch itself holds in one graph's step.

    Attributes:
        forward, backward: the two graphs of the step.
        saved, left: bytes as of `GraphPeaks`.
        alone: backward where the scalars among the outputs alone get gradients; None where no others need any.
    """

    forward: Part
    backward: Part
    saved: int
    left: int
    alone: Part | None = None

    def peaks(self, table: CostTable | None = None) -> GraphPeaks:
        """Its peaks, with what operators take while they run (a convolution's workspace) where a table is given.

        Args:
            table: runs those alone that are not known, within the room that there is.
        """
        phases = self.forward, self.backward, self.alone or self.backward
        try:
            forward, backward, alone = (phase.with_scratch(table) for phase in phases)
        except Exception as error:  # of operators that do not run alone
            log.info("what operators take while eager runs them is not known: %s", first_line(error))
            forward, backward, alone = (phase.peak for phase in phases)
        return GraphPeaks(forward, backward, self.saved, self.left, alone=None if self.alone is None else alone)


def eager_step(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> EagerStep | None:
    """What the graph holds in bytes when PyTorch runs it forward and backward, above its inputs.

    It is run on fake tensors, with the user's own checkpoints: nothing is computed, and no memory is taken. Autocast is
    as it is when this is called.

    Args:
        graph_module: Dynamo's graph; it is not changed.
        example_inputs: its inputs, real or fake.

    Returns:
        The step; None where the graph cannot run without real data.
    """
    # Another fake mode may be in force, as Dynamo is at work; the copies belong to one of their own.
    try:
        with no_fake_mode(), torch.enable_grad():
            found, others = _run(graph_module, example_inputs)
            if found is not None and others:
                alone, _ = _run(graph_module, example_inputs, roots_of)
                found = found if alone is None else dataclasses.replace(found, alone=alone.backward)
            return found
    except Exception as error:  # whatever the user's operators do on fake tensors
        log.info("eager's own peak is not known: %s", first_line(error))
        return None


def _run(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], chosen: Callable[[Any], Any] = list
) -> tuple[EagerStep | None, bool]:
    """The step whose backward begins with the chosen ones of its outputs, and whether some are scalars, some not."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [_copy(mode, value) for value in example_inputs]
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    trained = [value for value in tensors if value.requires_grad]
    if not trained:
        return None, False
    ledger = StepLedger(trained[0].device)
    with transforms_left(), mode, ledger, torch.random.fork_rng(devices=[]):
        for value in tensors:
            ledger.enter(value, counted=False)
        # A copy of the input is what autograd sees: leaves may not be written to in place.
        outputs = _Eager(graph_module).run(*inputs)
        # Of a graph a scalar output need be no loss: it may be a value that is logged.
        roots = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        del outputs
        forward, saved = ledger.part(), ledger.live
        if not roots:
            return None, False
        others = len({root.numel() == 1 for root in roots}) > 1
        start, tangents = start_of(chosen(roots), ledger)
        gradients = torch.autograd.grad(start, trained, tangents, allow_unused=True)
        backward = ledger.part()
        del start, tangents  # outputs stay: the caller may hold them, and a plan counts them
        passed_on = {id(value) for value in trained if not isinstance(value, torch.nn.Parameter)}
        user = [g for g, t in zip(gradients, trained, strict=True) if g is not None and id(t) in passed_on]
        left = ledger.live - sum(gradient.untyped_storage().nbytes() for gradient in user)
    return EagerStep(forward, backward, saved, max(0, left)), others


def roots_of(outputs: Any) -> list[torch.Tensor]:
    """The outputs from which backward is likely to start: the losses, where there are any beside logits."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return [leaf for leaf in leaves if leaf.numel() == 1] or leaves


def start_of(roots: Sequence[torch.Tensor], ledger: StepLedger) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What backward from these outputs starts from, and the gradients that it is given, which are not counted.

    The outputs' own gradients live until autograd has used them, as those that a loss makes.
    """
    if all(root.numel() == 1 for root in roots):
        return list(roots), [torch.ones_like(root) for root in roots]
    with ledger.ignoring():
        start = [_Loss.apply(*roots)]  # type: ignore[no-untyped-call]
        tangents = [torch.ones_like(start[0])]
    return start, tangents


class _Loss(torch.autograd.Function):
    """A scalar of tensors, whose gradients are ones."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        """Keep none of them."""
        ctx.made = [functools.partial(torch.ones, t.shape, dtype=t.dtype, device=t.device) for t in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, ...]:
        """Make their gradients."""
        return tuple(make() for make in ctx.made)


class _Eager(fx.Interpreter):
    """Runs a graph, and checkpoints what the user checkpoints; each value is released after its last use."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one node."""
        if str(target) != _CHECKPOINT:
            return super().call_function(target, args, dict(kwargs))
        body, *given = args
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
        if "_checkpoint_context_fn" in body.meta:
            options["context_fn"] = body.meta["_checkpoint_context_fn"]

        def run(*values: Any) -> Any:
            return _Eager(body).run(*values)

        return checkpoint(run, *given, **options)


def _copy(mode: FakeTensorMode, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FakeTensor) or value.is_meta:
        device = value.fake_device if isinstance(value, FakeTensor) else torch.device("cpu")
        with mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    else:
        fake = mode.from_tensor(value.detach(), static_shapes=True)
    twin: torch.Tensor = torch.nn.Parameter(fake, False) if isinstance(value, torch.nn.Parameter) else fake
    return twin.requires_grad_() if value.requires_grad else twin
