"""A program as plain nodes and as readable text."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from memopt.difference.digest import tensor_digest
from memopt.difference.graph_diff import GraphNode
from memopt.graph import fake_calls
from memopt.graph.rewrite import storages
from memopt.program import InputKind, Program, source_line, tensors_of

_FACT = "plain node"


def graph_nodes(program: Program, *, values: bool = False) -> list[GraphNode]:
    """The nodes of a program in order of execution, inputs first and one output node last.

    Args:
        program: read, not changed.
        values: whether to take a digest of each known parameter, buffer and constant, which reads all of their bytes.
    """
    users = 0
    found = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            entry = program.input_of(node.name)
            users += entry.kind is InputKind.USER
            text = f" {users - 1}" if entry.kind is InputKind.USER else f" {entry.target or node.name}"
            found.append(_node(node, "input" if entry.kind is InputKind.USER else entry.kind.value, (), _plain(text)))
            if values and node.name in program.state:
                found[-1] = _with_value(found[-1], program.state[node.name])
        elif node.op == "output":
            found.append(_output(program, node))
        else:
            found.append(_call(node))
    return found


def _call(node: fx.Node) -> GraphNode:
    """A call as a plain node; what was said of it in an earlier program is not written again."""
    marks = f" in place of argument {node.meta['inplace']}" if "inplace" in node.meta else ""
    marks += " again" if "recomputes" in node.meta else ""
    call, names = fake_calls.behind(node), list[str]()
    if call is not None:
        names = [operand.name for operand in fake_calls.operands_of(node)]
        known = call.facts.get(_FACT)
        if known is not None and known[:2] == (names, marks):
            said: GraphNode = known[2]
            return said
    inputs: list[str] = []
    args = [_argument(value, inputs) for value in node.args]
    args += [f"{key}={_argument(value, inputs)}" for key, value in node.kwargs.items()]
    said = _node(node, _operator(node), tuple(inputs), f"({', '.join(args)}){marks}")
    if call is not None:
        call.facts[_FACT] = names, marks, said
    return said


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that made the node (`stages.3.0.bn1`); empty when it is not known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    innermost = next(reversed(stack.values()), ("",))
    path = str(innermost[0])
    for prefix in ("L['self']", "L__self__"):
        path = path.removeprefix(prefix)
    return path.lstrip(".")


def _node(node: fx.Node, name: str, inputs: tuple[str, ...], text: str) -> GraphNode:
    given = {key for argument in node.all_input_nodes for key in storages(argument)}
    size = sum(nbytes for key, nbytes in storages(node).items() if key not in given)
    result = ", ".join(_type(tensor) for tensor in tensors_of(node))
    return GraphNode(node.name, name, inputs, text, result, module_path(node), source_line(node), bytes=size)


def _with_value(node: GraphNode, value: torch.Tensor) -> GraphNode:
    return dataclasses.replace(node, value=tensor_digest(value))


def _output(program: Program, node: fx.Node) -> GraphNode:
    inputs: list[str] = []
    words = []
    for role, value in zip(program.outputs, program.output_nodes, strict=True):
        target = "" if role.target is None else f" of {_plain(program.input_of(role.target).target or role.target)}"
        words.append(f"{role.kind.value}{target}: {_argument(value, inputs)}")
    return GraphNode(node.name, "output", tuple(inputs), f"({', '.join(words)})")


def _operator(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"attribute {node.target}"
    if node.target is operator.getitem:
        return "getitem"
    return str(node.target).removesuffix(".default")


def _argument(value: Any, inputs: list[str]) -> str:
    if isinstance(value, fx.Node):
        inputs.append(value.name)
        return f"%{len(inputs) - 1}"
    if isinstance(value, list | tuple):
        items = ", ".join(_argument(item, inputs) for item in value)
        return f"[{items}]"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return _plain(repr(value))


def _plain(text: str) -> str:
    return text.replace("%", "%%")


def _type(tensor: torch.Tensor) -> str:
    name = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return name
    return f"{name} strides {list(tensor.stride())}"
