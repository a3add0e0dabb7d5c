"""Run a program of a module and a loop in eager or on an engine, and write down everything that a user can see."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import hashlib
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import memopt


@dataclasses.dataclass
class Event:
    """What was seen at one place of the loop: `facts` are equal in every run, `values` up to rounding."""

    label: str
    facts: dict[str, Any]
    values: dict[str, Tensor]


@dataclasses.dataclass
class Run:
    """One run of a program: the events, and the error that ended it early."""

    events: list[Event]
    error: Exception | None
    words: tuple[str, ...] = ()


def namespace(dtype: torch.dtype, noise: int = 0) -> dict[str, Any]:
    """What a program's source may name. `draw` gives the same numbers in every dtype; `noise` moves their last bits."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        found = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        return _moved(found, noise + seed) if noise else found

    modules = {"torch": torch, "nn": nn, "F": functional, "copy": copy}
    return {**modules, "dataclasses": dataclasses, "collections": collections, "draw": draw}


def _moved(value: Tensor, seed: int) -> Tensor:
    size = 4e-7 * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(value.dtype)
    return value * (1 + size)


class See:
    """Handed to a loop: writes down what there is to see."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.events: list[Event] = []

    def outputs(self, out: Any, given: Any, mode: str = "") -> None:
        """A call's results: structure, layout, what requires gradients, what shares memory; and what it has changed."""
        leaves, spec = pytree.tree_flatten(out)
        named = {f"output {i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        facts: dict[str, Any] = {"structure": str(spec)}
        for i, leaf in enumerate(leaves):
            facts[f"output {i}"] = _facts(leaf)
        known = {f"input {i}": leaf for i, leaf in enumerate(given) if isinstance(leaf, Tensor)}
        known |= {name: value for name, value in _state(self.model).items() if not name.endswith("(copy)")}
        facts["sharing"] = _sharing(named, known)
        facts["identity"] = _identity(named, known)
        values = {name: value.detach().clone() for name, value in {**named, **known}.items()}
        for name, value in known.items():
            facts[name] = (_dtype(value), tuple(value.shape), value.requires_grad, value.grad_fn is not None)
        facts["random numbers"] = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
        values |= {f"output {i}": torch.tensor(leaf) for i, leaf in enumerate(leaves) if type(leaf) is float}
        self.events.append(Event(f"call {len(self.events)}{mode}", facts, values))

    def gradients(self, given: Any = ()) -> None:
        """Gradients of parameters and inputs: which are None, and the others' values."""
        tensors = {f"input {i}": leaf for i, leaf in enumerate(given) if isinstance(leaf, Tensor) and leaf.is_leaf}
        tensors |= dict(self.model.named_parameters())
        facts = {name: value.grad is None for name, value in tensors.items()}
        values = {f"gradient of {name}": v.grad.detach().clone() for name, v in tensors.items() if v.grad is not None}
        self.events.append(Event(f"gradients {len(self.events)}", facts, values))

    def tensors(self, *found: Tensor | None) -> None:
        """Tensors that the loop made itself, such as those of torch.autograd.grad."""
        facts = {f"result {i}": value is None for i, value in enumerate(found)}
        values = {f"result {i}": value.detach().clone() for i, value in enumerate(found) if value is not None}
        self.events.append(Event(f"tensors {len(self.events)}", facts, values))

    def state(self) -> None:
        """Parameters and buffers."""
        values = {name: value.detach().clone() for name, value in _state(self.model).items()}
        self.events.append(Event(f"state {len(self.events)}", {"names": list(values)}, values))


def _state(model: nn.Module) -> dict[str, Tensor]:
    plain = {name: value for name, value in vars(model).items() if isinstance(value, Tensor)}
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **plain}


def _dtype(value: Tensor) -> str:
    return "float" if value.is_floating_point() else str(value.dtype)


def _facts(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__ if type(leaf) is float else repr(leaf)
    strides = tuple(stride for stride, size in zip(leaf.stride(), leaf.shape, strict=True) if size > 1)
    return (type(leaf).__name__, _dtype(leaf), tuple(leaf.shape), strides, ("requires_grad", leaf.requires_grad))


def _sharing(named: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> list[Any]:
    """Groups of tensors in one storage, at least one of them an output, with offsets from the group's first."""
    groups: dict[int, list[tuple[str, int]]] = {}
    for name, value in {**named, **known}.items():
        groups.setdefault(value.untyped_storage().data_ptr(), []).append((name, value.storage_offset()))
    found = []
    for members in groups.values():
        if len(members) > 1 and any(name in named for name, _ in members):
            first = min(offset for _, offset in members)
            found.append(sorted((name, offset - first) for name, offset in members))
    return sorted(found)


def _identity(named: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Pairs that are one object, where gradients tell: `detach` without any need not make another."""
    every = list({**named, **known}.items())
    pairs = ((a, x, b, y) for i, (a, x) in enumerate(every) if a in named for b, y in every[i + 1 :])
    return [(a, b) for a, x, b, y in pairs if x is y and x.requires_grad]


# -- running ------------------------------------------------------------------------------------------------------


class _Words(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(
    source: str,
    dtype: torch.dtype = torch.float32,
    compiled: Callable[..., Any] | None = None,
    noise: int = 0,
) -> Run:
    """Build the model of a program, hand it to its loop, which makes its stand-in by `compiled`, and see what happens.

    Args:
        source: defines `Model`, `given()` and `loop(model, compiled, given, see)`.
        dtype: of every float that is drawn.
        compiled: None for eager.
        noise: if not 0, every number drawn is moved by a few of its last float32 bits.
    """
    space = namespace(dtype, noise)
    exec(compile(source, "<program>", "exec"), space)  # torch.compile reads bytecode: no file is needed
    torch.default_generator.manual_seed(0)
    model: nn.Module = space["Model"]()
    model.to(dtype)
    if noise:
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                parameter.copy_(_moved(parameter, noise + i))
    see, words, error = See(model), _Words(), None
    logger = logging.getLogger("memopt")
    logger.addHandler(words)
    try:
        # Inductor leaves it to a setting to draw as eager does: else no step with a dropout could be compared.
        with warnings.catch_warnings(), torch._inductor.config.patch(fallback_random=True):
            warnings.simplefilter("ignore")
            torch._dynamo.reset()  # graphs of other programs
            torch.default_generator.manual_seed(1)
            space["loop"](model, compiled or _eager, space["given"], see)
    except Exception as raised:
        error = raised
    finally:
        logger.removeHandler(words)
    return Run(see.events, error, tuple(words.lines))


def _eager(model: Any, optimizer: Any = None) -> Any:
    return model


def compiler(engine: str, budget: Any, verify: Any) -> Callable[..., Any]:
    """What makes the stand-in of a model, or of several in a list.

    `engine` may be "torch:" and a backend of torch.compile: what torch itself makes of a program.
    """

    def compiled(model: Any, optimizer: Any = None) -> Any:
        if engine.startswith("torch:"):
            made = functools.partial(torch.compile, backend=engine.removeprefix("torch:"))
            return [made(each) for each in model] if isinstance(model, list) else made(model)
        return memopt.compile(model, budget, optimizer=optimizer, backend=engine, verify=verify)

    return compiled
