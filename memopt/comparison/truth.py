"""The float64 truth of a step, kept in part, and how far a run is from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memopt.comparison.steps import call, loss_of
from memopt.torch_compat import pytree

# So many elements of a tensor are compared, drawn once: all of a large model's gradients in float64 fill a disk.
SAMPLE = 1 << 16
# Two runs that differ by more than this share do not differ by rounding of float64.
_SAME = 1e-9


@dataclasses.dataclass(frozen=True)
class Values:
    """What a step computed: a sample of each floating-point result, and of each parameter's gradient by its name."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]

    def save(self, path: str) -> None:
        """Write them for another process to read."""
        torch.save({"outputs": self.outputs, "gradients": self.gradients}, path)

    @classmethod
    def load(cls, path: str) -> Values:
        """Read what `save` wrote."""
        return cls(**torch.load(path))


def step_values(run: Callable[..., Any], model: nn.Module, inputs: Any, gradients: bool, seed: int = 1) -> Values:
    """Run one step and sample what it computed, as float64 on the CPU; gradients are taken away again."""
    torch.manual_seed(seed)
    with torch.set_grad_enabled(gradients):
        out = call(run, inputs)
        if gradients:
            torch.autograd.backward([loss_of(out)])
    outputs = [
        sample(leaf)
        for leaf in pytree.tree_leaves(out)
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
    found = {name: sample(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Values(outputs, found if gradients else {})


def truth(model: nn.Module, inputs: Any, training: bool) -> tuple[Values, bool]:
    """What the model computes in float64, and whether it draws random numbers in the mode that is compared.

    A training step that draws random numbers is replaced by one in eval mode, with gradients: engines may draw others.
    The model is changed to float64.

    Raises:
        ValueError: the model draws random numbers in eval mode too.
    """
    model = model.double()
    inputs = pytree.tree_map(_double, inputs)
    model.train(training)
    found = step_values(model, model, inputs, training)
    if not _random(found, step_values(model, model, inputs, training, seed=2)):
        return found, False
    if not training:
        raise ValueError("the model draws random numbers: engines cannot be compared by their results")
    model.eval()
    found = step_values(model, model, inputs, True)
    if _random(found, step_values(model, model, inputs, True, seed=2)):
        raise ValueError("the model draws random numbers in eval mode too: engines cannot be compared by their results")
    return found, True


def errors(found: Values, reference: Values) -> tuple[float | None, float | None]:
    """How far outputs and gradients are from the truth: see `Row.error` and `Row.gradient_error`.

    Raises:
        ValueError: there are other results than in the truth.
    """
    if len(found.outputs) != len(reference.outputs) or found.gradients.keys() != reference.gradients.keys():
        raise ValueError("the engine returns other results than the model, or no gradient of some parameter")
    outputs = _relative(dict(enumerate(found.outputs)), dict(enumerate(reference.outputs)))
    return outputs, _relative(found.gradients, reference.gradients)


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most `SAMPLE` elements, as float64 on the CPU: the same places for every tensor of as many elements."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    if flat.numel() > SAMPLE:
        generator = torch.Generator().manual_seed(0)
        flat = flat[torch.randint(flat.numel(), (SAMPLE,), generator=generator).to(flat.device)]
    return flat.double().cpu()


def _relative(found: Mapping[Any, torch.Tensor], reference: Mapping[Any, torch.Tensor]) -> float | None:
    if not reference:
        return None
    for name, value in reference.items():
        if found[name].shape != value.shape:
            raise ValueError("a result has another size than the model's")
    gap = sum(float((found[name] - value).square().sum()) for name, value in reference.items())
    size = sum(float(value.square().sum()) for value in reference.values())
    return float((gap / size) ** 0.5) if size else (0.0 if not gap else float("inf"))


def _random(one: Values, other: Values) -> bool:
    return any(error is not None and not error <= _SAME for error in errors(one, other))


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
