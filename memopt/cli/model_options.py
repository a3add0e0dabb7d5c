"""The options that say which model, at which size, in which kind of step: shared by `plan` and `inspect`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import click
import torch

from memopt.cli.group import USAGE, CommandError
from memopt.cli.loading import Request, is_keras
from memopt.memory.cost.devices import find

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """What was asked for: the model, the optimizer's name, and the name of a device that need not be here."""

    request: Request
    optimizer_name: str
    target: str | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ModelOptions:
        """Read what `model_options` parsed."""
        spec = options["model"]
        device, target = _here_or_elsewhere(options["device"])
        request = Request(
            spec=spec,
            batch=options["batch"],
            tiny=options["tiny"],
            # torch.export keeps forward only, and Keras files are read through it.
            training=not options["inference"] and not spec.lower().endswith(".pt2") and not is_keras(spec),
            factory=options["factory"],
            trust_pickle=options["trust_pickle"],
            device=device,
        )
        return cls(request, options["optimizer"], target)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer over the model's trainable parameters; None for inference, `none`, and nothing to train."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.request.training or self.optimizer_name == "none" or not parameters:
            return None
        return _OPTIMIZERS[self.optimizer_name](parameters, lr=1e-3)


def _here_or_elsewhere(name: str | None) -> tuple[str | None, str | None]:
    """A device of this machine, or the name of one to plan for without it."""
    if name is None or name.partition(":")[0] in ("cpu", "cuda"):
        return name, None
    try:
        return None, find(name).name
    except ValueError as error:
        raise CommandError(f"{error}; of this machine: cpu, cuda, cuda:N", USAGE) from error


def model_options(command: Any) -> Any:
    """Add the MODEL argument and the options that go with it to a verb."""
    for option in (
        click.option("--trust-pickle", is_flag=True, help="Read files that may run code when read."),
        click.option("--model", "factory", metavar="PACKAGE.MODULE:FACTORY", help="The module a state dict is for."),
        click.option("--device", metavar="DEVICE", help="cpu, cuda, cuda:N; or h100, a100, …, not needed here."),
        click.option("--inference", is_flag=True, help="A forward pass in eval mode, not a training step."),
        click.option(
            "--optimizer",
            type=click.Choice([*_OPTIMIZERS, "none"]),
            default="adamw",
            show_default=True,
            help="Whose state a training step holds.",
        ),
        click.option("--tiny", is_flag=True, help="The tiny size of a model of memopt.models."),
        click.option("--batch", type=click.IntRange(min=1), default=2, show_default=True, help="Examples in a step."),
        click.argument("model", metavar="MODEL"),
    ):
        command = option(command)
    return command
