"""Models compiled in place: for loops of others that hold the model itself and take no stand-in for it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from torch import nn

from memopt.api import compile
from memopt.module import CompiledModule, calls_of, compilable


def compile_in_place(
    model: nn.Module, budget: Any = None, *, eager_methods: tuple[str, ...] = (), **options: Any
) -> None:
    """From now on calls of this very model run as planned; whoever holds it need not know.

    The model gets a class of its own that is derived from its class and bears its name. What is compiled is a second
    object of the class that it had, with the same attributes. Copies of the model, and pickled ones, are as they were.

    Args:
        model: the model; one that is compiled in place already is compiled anew.
        budget: as `memopt.compile` takes it.
        eager_methods: methods whose own calls of the model run eagerly: of each a plan would be made for one call.
        options: as `memopt.compile` takes them.

    Raises:
        TypeError: the model is compiled already, or is none that `memopt.compile` takes, or one with slots.
        ValueError: as `memopt.compile`.
    """
    inner, kind = _second(model)
    model.__class__ = _kind_of(kind, compile(inner, budget, **options), eager_methods)


def compile_together_in_place(models: Sequence[nn.Module], budget: Any = None, **options: Any) -> None:
    """`compile_in_place` of several models that share a budget, as the list that `memopt.compile` takes.

    Raises:
        TypeError, ValueError: as `compile_in_place`.
    """
    if len(models) == 1:
        compile_in_place(models[0], budget, **options)
        return
    seconds = [_second(model) for model in models]
    stand_ins = compile([inner for inner, _ in seconds], budget, **options)
    for model, (_, kind), stand_in in zip(models, seconds, stand_ins, strict=True):
        model.__class__ = _kind_of(kind, stand_in, ())


def _second(model: nn.Module) -> tuple[nn.Module, type[nn.Module]]:
    """A second object of a model's class with its attributes, and that class; the model is as it was before any other.

    Raises:
        TypeError: as `compile_in_place`.
    """
    if compilable(model)[0] is not model:
        raise TypeError("this model is compiled by torch.compile already: compile the original model")
    undo(model)
    kind = type(model)
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        raise TypeError(f"{kind.__name__} keeps attributes in slots: use the stand-in that memopt.compile returns")
    inner: nn.Module = object.__new__(kind)
    inner.__dict__ = model.__dict__
    return inner, kind


def stand_in_of(model: nn.Module) -> CompiledModule | None:
    """The stand-in that calls of a model compiled in place go to; None of any other."""
    return vars(type(model)).get("_memopt_stand_in")


def undo(model: nn.Module) -> None:
    """The model is as it was before it was compiled in place."""
    stand_in = stand_in_of(model)
    if stand_in is not None:
        model.__class__ = type(vars(type(model))["_memopt_inner"])
        uncalled = calls_of(stand_in).uncalled
        if uncalled is not None:
            uncalled.stop()


def calling(model: nn.Module, call: Any) -> nn.Module:
    """The model as another object, with the same attributes, whose calls are `call`: for methods that call the model.

    Args:
        model: of a class without slots.
        call: takes what the model takes.
    """

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    made: nn.Module = object.__new__(derived(type(model), model, {"__call__": called}))
    made.__dict__ = model.__dict__
    return made


class _Unheard:
    """Registers that classes keep of their subclasses do not hear of one that no user wrote.

    It has a `__dict__` as modules have: objects change classes only between those that lie in memory alike.
    """

    def __init_subclass__(cls) -> None:
        pass


def _kind_of(kind: type[nn.Module], stand_in: CompiledModule, eager_methods: tuple[str, ...]) -> type[nn.Module]:
    """The class of a model compiled in place."""
    inner = calls_of(stand_in).model

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return stand_in(*args, **kwargs)

    def of_the_model(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(inner, name)(*args, **kwargs)

    own = {name: of_the_model(name) for name in eager_methods if callable(getattr(kind, name, None))}
    own |= {"__call__": call, "_memopt_stand_in": stand_in}
    return derived(kind, inner, own)


def derived(kind: type[nn.Module], inner: nn.Module, own: dict[str, Any]) -> type[nn.Module]:
    """A class that bears the name of another and has some methods more; copies of its objects have the other class.

    No metaclass sees it made, as those keep registers, too.

    Args:
        kind: the other class.
        inner: an object of it with the attributes of the objects of the new class.
        own: the methods, by name.
    """

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return inner.__reduce_ex__(1)  # later protocols want the class of the very object

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    make: Any = abc.ABCMeta.__new__ if issubclass(type(kind), abc.ABCMeta) else type.__new__
    bases = (_Unheard, kind)
    made: type[nn.Module] = make(
        type(kind), kind.__name__, bases, own | names | {"__reduce_ex__": reduce, "_memopt_inner": inner}
    )
    return made
