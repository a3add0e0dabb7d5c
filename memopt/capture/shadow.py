"""A dry run: a model's graphs captured on fake tensors, so that nothing runs and no memory is taken."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.capture.export import NotCapturedError
from memopt.capture.graph_inputs import Known, Names
from memopt.graph.weights import Held, by_itself, held
from memopt.memory.object_state import ObjectState
from memopt.memory.resident import storage_bytes
from memopt.program import InputKind
from memopt.torch_compat.fake_conversions import converted_as_real
from memopt.torch_compat.fully_sharded import Gathered, groups, stand_in
from memopt.torch_compat.modules import own_tensors
from memopt.torch_compat.packed_sequences import turned
from memopt.torch_compat.valued_fakes import ValuedFakeMode

_PARTS = ("_parameters", "_buffers", "_modules")

# Containers that code writes into; of other kinds the twin has the model's own.
_CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque)

# What of a function's variables is looked at.
_TURNED = (nn.Module, torch.Tensor, types.MethodType, types.FunctionType, functools.partial, tuple, *_CONTAINERS)


class Shadow:
    """A model's twin on fake tensors: the same modules and code, the same shapes, no data.

    Attributes:
        mode: the fake mode that its tensors belong to.
        model: the twin. It shares the original's plain attributes, and has parameters, buffers, hooks and containers of
            its own.
        names: role, qualified name and the real tensor's place of each of the twin's parameters and buffers, by `id`.
    """

    def __init__(self, model: nn.Module) -> None:
        """Make the twin.

        Raises:
            NotCapturedError: a part of the model is TorchScript's, which has no twin.
        """
        self.mode, self._original = ValuedFakeMode(), model
        self._given: Any = ()
        self._twins: dict[int, Any] = {}
        self._by_attributes: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._gathered = {id(each.shard): each for group, _ in groups(model) for each in group}
        self.model: nn.Module = self._twin_module(model)
        for twin in [twin for twin in self._twins.values() if isinstance(twin, nn.Module)]:
            own = {name: self._item(value) for name, value in twin.__dict__.items() if name not in _PARTS}
            twin.__dict__.update(own)
        self.names = {id(self._twins[key]): value for key, value in model_names(model).items() if key in self._twins}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within: the twin may run, in the fake mode of its tensors; what objects hold that it shares is set back."""
        reached = ObjectState(self._original, self._given)
        try:
            with converted_as_real(), self.mode:
                yield
        finally:
            reached.restore()

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fake copies of the tensors in the arguments; everything else as it is."""
        self._given = args, kwargs
        return turned(self._twin, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._twins:
            whole = self._gathered.get(id(tensor))
            fake = self._fake(tensor.detach()) if whole is None else self._fake_whole(whole)
            twin: torch.Tensor = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
            if not isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                twin = fake.requires_grad_()
            self._twins[id(tensor)] = twin
            self._alive.append(tensor)
        return self._twins[id(tensor)]  # type: ignore[no-any-return]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            fake = self.mode.from_tensor(tensor, static_shapes=True)
            if type(tensor) is torch.Tensor:
                self.mode.know(fake, tensor)
            return fake
        # A model that is too large to build here: as on CPU, since autograd loses gradients of meta tensors (nll_loss).
        return self.mode.without_value(tensor)

    def _fake_whole(self, whole: Gathered) -> torch.Tensor:
        """What forward sees of a shard."""
        with self.mode:
            return torch.empty(whole.shape, dtype=whole.dtype, device=whole.shard.device)

    def _twin_module(self, module: nn.Module) -> Any:
        if id(module) in self._twins:
            return self._twins[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            raise NotCapturedError(
                f"{module.original_name} is TorchScript's, of which no step can be counted: hand over the module that "
                "it was made of, or leave the budget out"
            )
        twin = _bare(module)
        twin.__dict__.update(module.__dict__)
        self._twins[id(module)] = self._by_attributes[id(module.__dict__)] = twin
        makers: tuple[Callable[[Any], Any], ...] = (self._twin, self._twin, self._twin_module)
        for kind, make in zip(_PARTS, makers, strict=True):
            children = {key: None if value is None else make(value) for key, value in getattr(module, kind).items()}
            twin.__dict__[kind] = type(getattr(module, kind))(children)
        if (calls := module.__dict__.get("_memopt")) is not None:  # a stand-in of memopt's within the model
            twin.__dict__["_memopt"] = types.SimpleNamespace(model=self._twin_module(calls.model), inlined=True)
        return twin

    def _turned(self, value: Any) -> Any:
        """A plain attribute that speaks of the model's modules or weights, made to speak of their twins."""
        if isinstance(value, torch.Tensor):
            return self._twins.get(id(value), value)
        if isinstance(value, nn.Module):
            return self._twin_of(value)
        if isinstance(value, types.MethodType):
            instead = stand_in(value)
            if instead is not None:
                return instead
            owner, function = self._turned(value.__self__), self._item(value.__func__)
            changed = owner is not value.__self__ or function is not value.__func__
            return types.MethodType(function, owner) if changed else value
        if type(value) is functools.partial:
            turned = functools.partial(
                self._turned(value.func),
                *map(self._turned, value.args),
                **{name: self._turned(item) for name, item in value.keywords.items()},
            )
            turned.__dict__.update(value.__dict__)
            return turned
        if type(value) is tuple and any(id(item) in self._twins or type(item) in _CONTAINERS for item in value):
            return tuple(map(self._turned, value))
        if isinstance(value, types.GeneratorType):
            return _Unread()
        return self._copied(value) if type(value) in _CONTAINERS else value

    def _twin_of(self, module: nn.Module) -> Any:
        """The twin of a module of the model, or of another object with its attributes, as one compiled in place has."""
        return self._twins.get(id(module), self._by_attributes.get(id(module.__dict__), module))

    def _item(self, value: Any) -> Any:
        """An attribute, or what a container holds, turned: functions too, as hooks and wrapped methods are."""
        is_closure = isinstance(value, types.FunctionType) and value.__closure__
        return self._turned_function(value) if is_closure else self._turned(value)

    def _turned_function(self, value: types.FunctionType) -> Any:
        """A function whose variables speak of the model's parts, or are containers that it may write into: a hook, say.

        It is the twin's own then, with the same code.
        """
        if id(value) in self._twins:
            return self._twins[id(value)]
        cells = [types.CellType() for _ in value.__closure__ or ()]
        twin = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
        twin.__kwdefaults__ = value.__kwdefaults__
        twin.__dict__.update(value.__dict__)
        self._twins[id(value)] = twin  # it may speak of itself
        self._alive.append(value)
        changed = False
        for cell, known in zip(cells, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it was never filled
                content = known.cell_contents
                cell.cell_contents = self._item(content) if isinstance(content, _TURNED) else content
                changed |= cell.cell_contents is not content
        if not changed:
            self._twins[id(value)] = value
        return self._twins[id(value)]

    def _copied(self, value: Any) -> Any:
        """A container of the twin's own, with what speaks of the model's parts turned: forward may write into it.

        One that several modules hold stays one, and may hold itself. Hooks that the twin registers are its own too.
        """
        if id(value) in self._twins:
            return self._twins[id(value)]
        twin = self._twins[id(value)] = copy.copy(value)
        self._alive.append(value)
        if isinstance(value, dict):
            twin.clear()
            twin.update({self._turned(key): self._item(item) for key, item in value.items()})
        elif isinstance(value, set):
            twin.clear()
            twin.update(map(self._item, value))
        else:
            for index, item in enumerate(value):
                twin[index] = self._item(item)
        return twin


class _Unread:
    """In place of a running function that yields: it can neither be copied nor set back."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise NotCapturedError("forward advances a generator, which cannot be set back: keep a list and an index")


def _bare(module: nn.Module) -> Any:
    """An object of the module's class without attributes, its slots apart: what pickling asks of it is not asked."""
    bare = object.__new__(type(module))
    for kind in type(module).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = kind.__dict__.get(name) or kind.__dict__.get(f"_{kind.__name__.lstrip('_')}{name}")
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it was never set
                    member.__set__(bare, member.__get__(module, type(module)))
    return bare


def model_names(model: nn.Module) -> Names:
    """Role, qualified name and place of each parameter and buffer, by `id`; a shared tensor under its first name."""
    names: dict[int, Known] = {}
    left: dict[int, int] = {}
    for group, stays in groups(model):
        for each in group:
            left[id(each.shard)] = each.whole_bytes if stays else storage_bytes([each.shard])
            if each.whole is not None:  # what forward sees in the shard's place
                names[id(each.whole)] = Known(InputKind.PARAMETER, each.name, None, left[id(each.shard)])
    owners: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for name, tensor in own_tensors(module):
            owners.setdefault(id(tensor), (module, name))

    def place(tensor: torch.Tensor) -> Held | None:
        return held(*owners[id(tensor)]) if id(tensor) in owners else by_itself(tensor)

    for name, parameter in model.named_parameters():
        known = Known(InputKind.PARAMETER, name, place(parameter), left.get(id(parameter)))
        names.setdefault(id(parameter), known)
    for name, buffer in model.named_buffers():
        names.setdefault(id(buffer), Known(InputKind.BUFFER, name, place(buffer)))
    return names
