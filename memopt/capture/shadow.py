"""A dry run: a model's graphs captured on fake tensors, so that nothing runs and no memory is taken."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from memopt.capture.dynamo import Names
from memopt.program import InputKind


class Shadow:
    """A model's twin on fake tensors: the same modules and code, the same shapes, no data.

    Attributes:
        mode: the fake mode that its tensors belong to.
        model: the twin. It shares the original's plain attributes, and has parameters and buffers of its own.
        names: role, qualified name and real tensor of each of the twin's parameters and buffers, by `id`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._twins: dict[int, Any] = {}
        self._alive: list[Any] = []
        self.model: nn.Module = self._twin_module(model)
        self.names = {id(self._twins[key]): value for key, value in model_names(model).items() if key in self._twins}

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fake copies of the tensors in the arguments; everything else as it is."""
        return pytree.tree_map_only(torch.Tensor, self._twin, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._twins:
            fake = self._fake(tensor.detach())
            twin: torch.Tensor = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
            if not isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                twin = fake.requires_grad_()
            self._twins[id(tensor)] = twin
            self._alive.append(tensor)
        return self._twins[id(tensor)]  # type: ignore[no-any-return]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return self.mode.from_tensor(tensor, static_shapes=True)
        # A model that is too large to build here: as on CPU, since autograd loses gradients of meta tensors (nll_loss).
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def _twin_module(self, module: nn.Module) -> Any:
        if id(module) in self._twins:
            return self._twins[id(module)]
        twin = copy.copy(module)
        twin.__dict__ = dict(module.__dict__)
        self._twins[id(module)] = twin
        for kind, make in (("_parameters", self._twin), ("_buffers", self._twin), ("_modules", self._twin_module)):
            children = {key: None if value is None else make(value) for key, value in getattr(module, kind).items()}
            twin.__dict__[kind] = type(getattr(module, kind))(children)
        return twin


def model_names(model: nn.Module) -> Names:
    """Role, qualified name and tensor of each parameter and buffer, by `id`; a shared tensor under its first name."""
    names: dict[int, tuple[InputKind, str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), (InputKind.PARAMETER, name, parameter))
    for name, buffer in model.named_buffers():
        names.setdefault(id(buffer), (InputKind.BUFFER, name, buffer))
    return names
