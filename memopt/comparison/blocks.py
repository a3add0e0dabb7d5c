"""A peer: eager PyTorch with every block of the model in torch.utils.checkpoint, as people write it by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from memopt.torch_compat import pytree
from memopt.torch_compat.modules import own_parameters

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def checkpoint_blocks(model: nn.Module) -> list[str]:
    """Let every block recompute its activations in backward; the model is changed. Returns the blocks' names.

    Raises:
        ValueError: the model has no repeated blocks.
    """
    names = blocks_of(model)
    if not names:
        raise ValueError("the model has no repeated blocks to checkpoint")
    for name in names:
        module = model.get_submodule(name)

        def again(*args: Any, _forward: Any = module.forward, **kwargs: Any) -> Any:
            # Lists that the caller adds to afterwards, as in a DenseNet, are kept as they are now.
            args, kwargs = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
            return checkpoint(_forward, *args, use_reentrant=False, **kwargs)

        module.forward = again
    return names


def blocks_of(model: nn.Module) -> list[str]:
    """The names of the innermost modules of several layers that stand side by side with others of their class.

    Plain containers count only in a model that repeats nothing else.
    """
    repeated = {
        kind
        for module in model.modules()
        for kind, count in Counter(type(child) for child in module.children() if _layers(child) > 1).items()
        if count > 1
    }
    kinds = {kind for kind in repeated if not issubclass(kind, _CONTAINERS)} or repeated
    return [name for name, module in model.named_modules() if type(module) in kinds and not _holds(module, kinds)]


def _layers(module: nn.Module) -> int:
    """Modules with parameters of their own."""
    return sum(bool(own_parameters(item)) for item in module.modules())


def _holds(module: nn.Module, kinds: set[type[nn.Module]]) -> bool:
    return any(type(item) in kinds for item in module.modules() if item is not module)
