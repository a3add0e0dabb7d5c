"""Straight-line code of a planned program: views of the arena are made when it is bound, the rest at each call."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from memopt.graph.result_memory import as_run
from memopt.memory.aliasing import Aliasing, analyse
from memopt.memory.buffers import BufferPlan, Home, Placement
from memopt.passes.inplace import takes_storage
from memopt.program import InputKind, Program, tensors_of
from memopt.static.forms import cat_dim, is_joinable, makes_view, parts_to_copy
from memopt.static.write import Out, Place, Write


@dataclasses.dataclass(frozen=True)
class Code:
    """The function of a program, but for its views of the arena.

    Attributes:
        source: Python code of `run(*inputs)`, which returns the list of outputs.
        names: what the source refers to: operators and constants.
        tensors: the placement in the arena of each name that stands for such a tensor, and its dtype.
        views: in order, the names that are views of other names: the operator, and its arguments with names in `Name`s.
    """

    source: str
    names: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, Placement, torch.dtype]]
    views: tuple[tuple[str, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], ...]

    def bind(self, memory: torch.Tensor) -> Callable[..., list[Any]]:
        """The function, with all tensors in `memory`, a flat tensor of bytes."""
        namespace = dict(self.names)
        for name, (offset, place, dtype) in self.tensors.items():
            first = (offset + place.offset) // place.itemsize
            empty = torch.empty(0, dtype=dtype, device=memory.device)
            namespace[name] = empty.set_(memory.untyped_storage(), first, place.shape, place.strides)
        for name, function, args, kwargs in self.views:
            args, kwargs = _substitute((args, kwargs), namespace)
            namespace[name] = function(*args, **kwargs)
        exec(compile(self.source, "<memopt static program>", "exec"), namespace)
        return namespace["run"]  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Name:
    """Stands for what has that name when the code is bound."""

    name: str


def _substitute(value: Any, namespace: Mapping[str, Any]) -> Any:
    if isinstance(value, Name):
        return namespace[value.name]
    if isinstance(value, (list, tuple)):
        return type(value)(_substitute(item, namespace) for item in value)
    if isinstance(value, dict):
        return {key: _substitute(item, namespace) for key, item in value.items()}
    return value


def generate(program: Program, plan: BufferPlan, writes: Mapping[str, Write | None]) -> Code:
    """Generate the code of a planned program.

    Args:
        program: the program, whose constants become part of the code.
        plan: where everything lives.
        writes: by node name, how an operator writes into given memory; None where it allocates.
    """
    return _Generator(program, plan, writes).code()


class _Generator:
    def __init__(self, program: Program, plan: BufferPlan, writes: Mapping[str, Write | None]) -> None:
        self.program, self.plan, self.writes = program, plan, writes
        self.aliasing: Aliasing = analyse(program)
        self.lines: list[tuple[str, str | None]] = []  # code, and the variable that it makes
        self.constants: dict[str, Any] = {"_as_strided": torch.as_strided, "_empty": torch.empty_strided}
        self.tensors: dict[str, tuple[int, Placement, torch.dtype]] = {}
        self.views: list[tuple[str, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]] = []
        self.fixed: set[str] = set()  # names that are known when the code is bound
        self.name: dict[fx.Node, Any] = {}  # a name, or a list of names for a multiple result
        self.made: dict[int, tuple[str, Placement]] = {}  # output blocks that were allocated so far
        self.count = 0

    def code(self) -> Code:
        arguments: list[str] = []
        for entry, node in zip(self.program.inputs, self.program.placeholders, strict=True):
            if entry.kind is InputKind.CONSTANT:
                self.name[node] = self.constant(self.program.state[entry.name], f"k_{node.name}")
            else:
                self.name[node] = f"a{len(arguments)}"
                arguments.append(self.name[node])
        for node in self.program.graph.nodes:
            if node.op == "get_attr":  # the body of a higher-order operator
                self.name[node] = self.constant(getattr(self.program.graph_module, str(node.target)), f"g_{node.name}")
            elif node.op == "call_function":
                self.step(node)
        outputs = self.literal(list(self.program.graph.output_node().args[0]))  # type: ignore[arg-type]
        body = "".join(f"    {line}\n" for line in self.with_releases(outputs))
        source = f"def run({', '.join(arguments)}):\n{body}    return {outputs}\n"
        return Code(source, self.constants, self.tensors, tuple(self.views))

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, node: fx.Node) -> None:
        """Write the code of one call node."""
        if node.target is operator.getitem:
            base = self.name[node.args[0]]  # type: ignore[index]
            item: Any = node.args[1]
            self.name[node] = base[item] if isinstance(base, list) else self.call(operator.getitem, node.args, {})
        elif node.name in self.plan.joins:
            self.name[node] = self.results(node)[0]
            self.copy_parts(node, self.plan.joins[node.name])
        elif makes_view(node, self.aliasing):
            self.name[node] = self.call(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        elif (write := self.writes[node.name]) is not None:
            self.write(node, write)
        elif is_joinable(node) and self.plan.values[node.name][0] is not None:
            self.name[node] = self.results(node)[0]
            self.copy_parts(node, (False,) * len(node.args[0]))  # type: ignore[arg-type]
        else:
            self.name[node] = self.call(as_run(node.target), node.args, node.kwargs, fixed=False)

    def write(self, node: fx.Node, write: Write) -> None:
        operand = takes_storage(node)
        outs = [self.name[operand]] if operand is not None else self.results(node)
        places = {Place.OUTS: tuple(Name(out) for out in outs), Place.SCRATCH: self.scratch(node)}

        def fill(value: Any) -> Any:
            if isinstance(value, Out):
                return Name(outs[value.index])
            if isinstance(value, Place):
                return places[value]
            if isinstance(value, (list, tuple)):
                return type(value)(fill(item) for item in value)
            return value

        arguments = [self.literal(fill(value)) for value in write.args]
        arguments += [f"{key}={self.literal(fill(value))}" for key, value in write.kwargs.items()]
        self.lines.append((f"{self.constant(write.function)}({', '.join(arguments)})", None))
        single = isinstance(node.meta["val"], torch.Tensor)
        self.name[node] = outs[0] if single else outs

    def copy_parts(self, node: fx.Node, joined: tuple[bool, ...]) -> None:
        out, dim = self.name[node], cat_dim(node)
        for part, start, length in parts_to_copy(node, joined):
            target = self.call(torch.ops.aten.slice.Tensor, (Name(out), dim, start, start + length), {})
            copy = self.constant(torch.ops.aten.copy_.default)
            self.lines.append((f"{copy}({target}, {self.name[part]})", None))

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any, *, fixed: bool = True) -> str:
        """A name for the value of a call: made when the code is bound if all operands are, else at every call."""
        args = tuple(args)
        operands = list[str]()

        def note(value: Any) -> Any:
            if isinstance(value, fx.Node):
                value = Name(self.name[value])
            if isinstance(value, Name):
                operands.append(value.name)
            if isinstance(value, (list, tuple)):
                return type(value)(note(item) for item in value)
            if isinstance(value, dict):
                return {key: note(item) for key, item in value.items()}
            return value

        args, kwargs = note(args), note(dict(kwargs))
        name = self.fresh("s" if fixed and self.fixed.issuperset(operands) else "v")
        if name[0] == "s":
            self.views.append((name, function, args, kwargs))
            self.fixed.add(name)
            return name
        arguments = [self.literal(value) for value in args]
        arguments += [f"{key}={self.literal(value)}" for key, value in kwargs.items()]
        self.lines.append((f"{name} = {self.constant(function)}({', '.join(arguments)})", name))
        return name

    # -- memory --------------------------------------------------------------------------------------------------

    def results(self, node: fx.Node) -> list[str]:
        """The names of the tensors that the node writes."""
        values = tensors_of(node)
        return [
            self.tensor(place, value.dtype, value.device)
            for place, value in zip(self.plan.values[node.name], values, strict=True)
            if place is not None
        ]

    def tensor(self, place: Placement, dtype: torch.dtype, device: torch.device) -> str:
        block = self.plan.blocks[place.block]
        if block.home is Home.ARENA:
            name = self.fresh("s")
            self.tensors[name] = (block.offset, place, dtype)
            self.fixed.add(name)
            return name
        if place.block not in self.made:
            # The block may hold slices of one value: it is allocated in the layout of the whole.
            whole = self.whole(place.block, place)
            base = self.fresh("v")
            layout = f"{whole.shape}, {whole.strides}, dtype={self.constant(dtype)}, device={self.constant(device)}"
            self.lines.append((f"{base} = _empty({layout})", base))
            self.made[place.block] = base, whole
        base, whole = self.made[place.block]
        if (place.offset, place.shape, place.strides) == (whole.offset, whole.shape, whole.strides):
            return base
        name = self.fresh("v")
        first = place.offset // place.itemsize
        self.lines.append((f"{name} = _as_strided({base}, {place.shape}, {place.strides}, {first})", name))
        return name

    def whole(self, block: int, default: Placement) -> Placement:
        """The placement that fills an output block."""
        every = (p for places in self.plan.values.values() for p in places if p is not None and p.block == block)
        return max(every, key=lambda p: p.end - p.offset, default=default)

    def scratch(self, node: fx.Node) -> Name | None:
        if node.name not in self.plan.scratch:
            return None
        index = self.plan.scratch[node.name]
        value = tensors_of(node)[0]
        size = value.element_size()
        flat = Placement(index, 0, (self.plan.blocks[index].nbytes // size,), (1,), size)
        return Name(self.tensor(flat, value.dtype, value.device))

    # -- text ----------------------------------------------------------------------------------------------------

    def fresh(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def constant(self, value: Any, name: str | None = None) -> str:
        if name is None:
            kind = "f_" + "".join(c if c.isalnum() else "_" for c in str(value)) if callable(value) else "c"
            known = (key for key, found in self.constants.items() if key.startswith(kind) and found is value)
            name = next(known, None) or (kind[:60] if kind != "c" else "c") + f"_{len(self.constants)}"
        self.constants[name] = value
        self.fixed.add(name)
        return name

    def literal(self, value: Any) -> str:
        if isinstance(value, Name):
            return value.name
        if isinstance(value, fx.Node):
            found = self.name[value]
            return f"[{', '.join(found)}]" if isinstance(found, list) else str(found)
        if isinstance(value, (list, tuple)):
            items = "".join(self.literal(item) + ", " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.literal(item)}" for key, item in value.items()) + "}"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self.constant(value)

    def with_releases(self, outputs: str) -> list[str]:
        """The lines, each followed by the release of what is not used any more."""
        word = re.compile(r"\bv\d+\b")
        kept = set(word.findall(outputs))
        found: list[str] = []
        for text, _ in reversed(self.lines):
            used = list(dict.fromkeys(word.findall(text)))
            dying = [name for name in used if name not in kept]
            kept.update(used)
            if dying:
                found.append("del " + ", ".join(dying))
            found.append(text)
        return found[::-1]
