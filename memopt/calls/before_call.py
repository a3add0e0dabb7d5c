"""The state of a model, a call's arguments and random numbers before that call, to return to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from memopt.calls.compared import same_numbers
from memopt.calls.held import Held, leaves_of
from memopt.capture.overlap import may_overlap
from memopt.common.random_streams import host_state, set_host_state
from memopt.torch_compat.storages import is_tracked_view, set_version, version_of


class BeforeCall:
    """The state of a model, a call's arguments and random numbers, to return to.

    Attributes:
        histories: what each tensor that the call may write to was computed of, by name.
        random: the generators' states.
    """

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy what a call may write to."""
        self.model, self.args, self.kwargs = model, args, kwargs
        self.random = random_states()
        self._held = Held(model)
        written = self.written()
        values = (_once_each(tensor.detach()) for tensor in written.values())
        self._tensors = [(tensor, tensor.clone(), _version(tensor)) for tensor in values]
        self.histories = {name: _History(tensor) for name, tensor in written.items()}

    def written(self) -> dict[str, torch.Tensor]:
        """Tensors that a call may write to, or have gradients of, as they are now, by name."""
        found: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        found.update(self.model.named_buffers())
        for index, leaf in enumerate(leaves_of((self.args, self.kwargs))):
            if isinstance(leaf, torch.Tensor):
                found[f"argument {index}"] = leaf
        known = {id(tensor) for tensor in found.values()}
        held = Held(self.model).values.items()
        found |= {name: value for name, value in held if isinstance(value, torch.Tensor) and id(value) not in known}
        return {name: tensor for name, tensor in found.items() if tensor.layout is torch.strided}

    @property
    def in_history(self) -> bool:
        """Whether calls stay in the history of an argument: of what they write to a view its base has come."""
        return any(is_tracked_view(item.tensor) and item.source is not None for item in self.histories.values())

    def unwritten(self) -> list[torch.Tensor]:
        """Memory of what the call that runs has not written to, each element once."""
        return [tensor for tensor, _, version in self._tensors if _version(tensor) == version]

    def restore(self) -> None:
        """Return to it."""
        self._held.restore()
        with torch.no_grad():
            for tensor, value, version in self._tensors:
                if not same_numbers(tensor, value):
                    tensor.data.copy_(value)
                if _version(tensor) != version:  # it may be what earlier calls have saved for their backward
                    set_version(tensor, version)
        for history in self.histories.values():
            history.restore()
        set_random_states(self.random)


class _History:
    """What a tensor was computed from, and its gradient, to return to after a call and its backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._node, self._trained = tensor, tensor.grad_fn, tensor.requires_grad
        self._copy = tensor.clone() if self._node is not None and torch.is_grad_enabled() else None
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._values = None if self._gradient is None else self._gradient.detach().clone()
        # What gradients of it are asked of.
        self.source: GradientEdge | None = None
        if self._trained and torch.is_grad_enabled():
            self.source = get_gradient_edge(tensor)

    @property
    def written(self) -> bool:
        """Whether it has come of something else since."""
        return self.tensor.grad_fn is not self._node

    def restore(self) -> None:
        """Return to it."""
        if self._node is None and self.tensor.is_leaf:
            self.tensor.requires_grad_(self._trained)
            self._restore_gradient()
        if not self.written:
            return
        if not is_tracked_view(self.tensor):
            self.tensor.detach_()
            self.tensor.requires_grad_(self._trained and self._copy is None)
        if self._copy is not None:  # a copy of what has the history has it, too
            with torch.enable_grad():
                self.tensor.copy_(self._copy)
            self._node, self.source = self.tensor.grad_fn, get_gradient_edge(self.tensor)

    def _restore_gradient(self) -> None:
        if self.tensor.grad is not self._gradient:
            self.tensor.grad = self._gradient
        if self._gradient is not None and self._values is not None:
            with torch.no_grad():
                self._gradient.copy_(self._values)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _once_each(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor that may show elements many times, as `expand` and `unfold` do, which cannot be filled."""
    if not may_overlap(tensor):
        return tensor
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


def random_states() -> list[torch.Tensor]:
    """Of the host's CPU, of CUDA devices, and last of Python and NumPy."""
    devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    cuda = (torch.cuda.get_rng_state(index) for index in range(devices))
    return [torch.get_rng_state(), *cuda, torch.frombuffer(bytearray(host_state()), dtype=torch.uint8)]


def set_random_states(states: Sequence[torch.Tensor]) -> None:
    """Return to what `random_states` gave."""
    torch.set_rng_state(states[0])
    for index, state in enumerate(states[1:-1]):
        torch.cuda.set_rng_state(state, index)
    set_host_state(states[-1].numpy().tobytes())
