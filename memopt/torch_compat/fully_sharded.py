"""Parameters that FSDP2 (`fully_shard`) shards and gathers, where it has no public names; tried on 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from memopt.torch_compat.dynamo import is_passed_over, own_entry, with_entries
from memopt.torch_compat.modules import modules_of
from memopt.torch_compat.patched import replaced

# Where the state of `fully_shard` is of one of its classes, the distributed part of torch has been imported.
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


class Gathered(NamedTuple):
    """A parameter as forward sees it: whole, in the dtype that it computes in.

    Attributes:
        name: qualified, in the root; empty before the first call.
        shard: what the model has of it outside of forward.
        shape, dtype: of the whole.
        whole: the parameter that has been gathered; None before the first call.
        reduced_dtype: of the gradient that is sent.
    """

    name: str
    shard: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    whole: nn.Parameter | None
    reduced_dtype: torch.dtype

    @property
    def whole_bytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def sent_bytes(self) -> int:
        """Of its gradient as it is sent."""
        return math.prod(self.shape) * self.reduced_dtype.itemsize if self.shard.requires_grad else 0


def groups(model: nn.Module) -> Iterator[tuple[list[Gathered], bool]]:
    """What is gathered together, in the order of the modules, and whether it stays from forward on to backward."""
    for group, stays in _groups(model):
        yield [_gathered(param, group.mp_policy) for param in group.fsdp_params], stays


def kept_root(model: nn.Module) -> Any:
    """Torch's own object behind the first group, if that stays; None otherwise. Nothing runs before it is whole."""
    first, stays = next(_groups(model), (None, False))
    return first if stays else None


def _groups(model: nn.Module) -> Iterator[tuple[Any, bool]]:
    root = True
    for state in _states_of(model):
        for group in _groups_of(state):
            stays = group.post_forward_mesh_info is None or (
                root and getattr(state, "_auto_reshard_after_forward", False)
            )
            yield group, stays
        root = False


def groups_in(model: nn.Module) -> list[Any]:
    """Torch's own objects behind `groups`."""
    return [group for state in _states_of(model) for group in _groups_of(state)]


def is_sharded(model: nn.Module) -> bool:
    """Whether a part of the model is sharded by `fully_shard`."""
    return bool(_states_of(model))


def passes_results_on(hook: Any) -> bool:
    """Whether a hook is `fully_shard`'s own behind a module's forward, which returns what it is given.

    It has autograd tell it when a gradient of that comes. With a type for outputs (`output_dtype`) it casts.
    """
    state = getattr(hook, "__self__", None)
    policy = getattr(state, "_mp_policy", None)
    return type(state).__module__ == _STATE and policy is not None and policy.output_dtype is None


@contextlib.contextmanager
def sharded_captured(model: nn.Module) -> Iterator[None]:
    """Within: Dynamo captures modules of torch's own classes that `fully_shard` was called with, as it does others.

    Their hooks break the graph, so that their forward is called by itself, and Dynamo looks at no function of torch's
    files: a block that is an `nn.Sequential`, or an `nn.Linear`, would run operator by operator. Torch 2.13 looks at
    what has hooks unless its class is of `fully_shard`'s making. That class calls its forward by an entry here.

    Args:
        model: or its twin in a dry run.
    """
    with contextlib.ExitStack() as stack:
        seen: set[Any] = set()
        for module in modules_of(model) if _STATE in sys.modules else ():  # in every call: else there is none
            kind: Any = type(module)
            entries = _entries_of(kind) if isinstance(module, torch.distributed.fsdp.FSDPModule) else None
            if entries is not None:
                entries.admit(module)
                if kind not in seen:
                    seen.add(kind)
                    stack.enter_context(replaced(kind, "forward", entries.enters))
        yield


class _Entries:
    """Entries to the forward of a class that `fully_shard` has made.

    Modules that look alike share one, and what is compiled of it; those within one another have two, as Dynamo takes
    what it made of the outer one for the inner one's.

    Attributes:
        enters: the forward that calls them.
    """

    def __init__(self, forward: types.FunctionType) -> None:
        self._forward = forward
        self._alike: dict[str, types.FunctionType] = {}
        self._known: dict[int, types.FunctionType] = {}
        self.enters = with_entries(forward, self._known)

    def admit(self, module: nn.Module) -> None:
        """Make an entry, which Dynamo would look into if it were made in a call."""
        if id(module) not in self._known:  # or one that is gone had this number: any entry calls the same forward
            looks = repr(module)
            self._alike.setdefault(looks, own_entry(self._forward))
            self._known[id(module)] = self._alike[looks]


@functools.cache
def _entries_of(kind: type[nn.Module]) -> _Entries | None:
    """Those of a class, which torch keeps for good as well; None where Dynamo looks at its forward."""
    forward = getattr(kind, "forward", None)
    return _Entries(forward) if isinstance(forward, types.FunctionType) and is_passed_over(forward) else None


def let_go(model: nn.Module) -> None:
    """After a forward that was broken off: what was gathered is let go of, and the next call begins anew."""
    begun = [state for state in _states_of(model) if state._is_root and state._state_ctx.iter_forward_root is not None]
    for root in begun:
        if hasattr(root, "_reset_iter_state"):  # from 2.13 on
            root._reset_iter_state()
            continue
        root._comm_ctx.all_gather_state = None
        root._comm_ctx.post_forward_order.clear()
        root._state_ctx.iter_forward_root = None
        for state in root._state_ctx.all_states:
            getattr(state, "_modules_to_run_forward", set()).clear()
            state._training_state = type(state._training_state).IDLE
            for group in _groups_of(state):
                group.wait_for_unshard()
                group._training_state = type(group._training_state).IDLE
                group._post_forward_indices.clear()
                group._to_sharded()


def stand_in(hook: types.MethodType) -> Callable[..., Any] | None:
    """What takes the place of a hook that gathers or frees, in a dry run: it only casts; None for any other method.

    It breaks a graph where the hook does.
    """
    state: Any = hook.__self__
    if type(state).__module__ != _STATE:
        return None
    before, policy = hook.__func__.__name__ == "_pre_forward", state._mp_policy
    wanted = policy.param_dtype if before and policy.cast_forward_inputs else None if before else policy.output_dtype

    def cast(leaf: Any) -> Any:
        is_cast = wanted is not None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(wanted) if is_cast else leaf

    def enters(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, (args, kwargs))

    def leaves(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(cast, output)

    return torch.compiler.disable(enters if before else leaves, reason="FSDP gathers parameters")  # type: ignore[no-untyped-call,no-any-return]


def _states_of(model: nn.Module) -> list[Any]:
    home = sys.modules.get(_STATE)
    if home is None:  # nothing is sharded before it is imported: calls without gradients ask each time
        return []
    return list(dict.fromkeys(filter(None, map(home._get_module_fsdp_state, modules_of(model)))))


def _groups_of(state: Any) -> list[Any]:
    many = getattr(state, "_fsdp_param_groups", None)  # before 2.12 there was one
    return list(many) if many is not None else [group for group in (state._fsdp_param_group,) if group is not None]


def _gathered(param: Any, policy: Any) -> Gathered:
    shard = param.sharded_param
    is_float = shard.dtype.is_floating_point
    dtype = policy.param_dtype if policy.param_dtype is not None and is_float else shard.dtype
    name, whole = getattr(param, "_param_fqn", None) or "", getattr(param, "_unsharded_param", None)
    return Gathered(name, shard, shard.shape, dtype, whole, policy.reduce_dtype or dtype)
