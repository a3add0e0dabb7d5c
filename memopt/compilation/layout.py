"""Laying out weights of a model anew where that is faster: channels-last for convolutions, side by side for products.

A kernel that wants its weights channels-last converts them at every call, or keeps a second copy. A parameter that is
itself laid out so needs neither: its values, shape, name and `Parameter` object stay, only its strides change, as with
`model.to(memory_format=torch.channels_last)`. Weights that multiply the same value (query, key, value) are moved into
one block, so that they can be read as one matrix without a copy of them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from memopt.backends.timing import made_like, seconds_of
from memopt.graph.synthesis import same_random_state
from memopt.memory.cost.key import key_of
from memopt.memory.cost.roofline import moving_seconds, operands_of, seconds
from memopt.memory.cost.scratch import workspace_bytes
from memopt.memory.cost.table import CostTable, OperatorCost
from memopt.patterns.batch_stretches import CONVOLUTIONS
from memopt.patterns.products import products_of_one
from memopt.patterns.rows import HALVES
from memopt.program import InputKind, Program
from memopt.torch_compat.storages import storage_users

aten = torch.ops.aten

# Channels-last must win this share of the time: the difference must be more than noise.
_WORTH = 0.05


class LayoutNeeded(Exception):
    """The model is faster with weights laid out otherwise: lay them out so, and capture anew.

    Attributes:
        names: qualified names of the parameters to lay out channels-last.
        groups: qualified names of parameters to be moved side by side, group by group.
        contiguous: which outputs of the captured graph are contiguous, as callers should see them afterwards.
    """

    def __init__(self, names: Sequence[str], groups: Sequence[Sequence[str]], contiguous: Sequence[bool]) -> None:
        super().__init__("weights should be laid out otherwise")
        self.names, self.groups, self.contiguous = tuple(names), tuple(map(tuple, groups)), tuple(contiguous)


class WeightLayout:
    """How a model's weights lie for its inference, and whether they may be laid out anew.

    Attributes:
        movable: names of the parameters that may be; none once that was done.
        contiguous: which outputs were contiguous before that was done; empty as long as it was not.
    """

    def __init__(self, movable: Iterable[str] = ()) -> None:
        """Of a model whose weights lie as the user made them."""
        self.movable = frozenset(movable)
        self.contiguous: tuple[bool, ...] = ()
        self._laid_out: set[str] = set()  # fingerprints of graphs whose weights lie as they should

    def laid_out(self, program: Program, key: str) -> Program:
        """As `with_layout`; a graph is asked once, by its fingerprint `key`: other values are not timed again.

        Raises:
            LayoutNeeded: it is faster with weights laid out otherwise.
        """
        program = with_layout(program, () if key in self._laid_out else self.movable, self.contiguous)
        self._laid_out.add(key)
        return program

    def changes(self, needed: LayoutNeeded) -> None:
        """Weights are being laid out as a graph needs it, and are not moved again."""
        self.movable, self.contiguous = frozenset(), needed.contiguous


def movable_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters whose storage nothing else refers to, as far as PyTorch counts references."""
    named = list(model.named_parameters(remove_duplicate=False))
    times = collections.Counter(id(parameter) for _, parameter in named)
    return frozenset(name for name, parameter in named if times[id(parameter)] == 1 and _is_alone(parameter))


def _is_alone(parameter: torch.Tensor) -> bool:
    if parameter.layout is not torch.strided:
        return False
    storage = parameter.untyped_storage()
    whole = storage.nbytes() == parameter.numel() * parameter.element_size()
    return whole and storage_users(storage) == 2  # the parameter, and `storage` here


def convolution_weights(program: Program, movable: Iterable[str]) -> list[str]:
    """Names of the movable parameters that two-dimensional convolutions use and that are laid out contiguously."""
    movable, entries = frozenset(movable), {entry.name: entry for entry in program.inputs}
    found = []
    for node in _convolutions(program):
        weight: Any = node.args[1]
        entry = entries.get(weight.name)
        if entry is None or entry.kind is not InputKind.PARAMETER or entry.target not in movable:
            continue
        value = weight.meta["val"]
        users = [user for user in weight.users if user.target is not aten.convolution.default]
        if value.is_contiguous() and not value.is_contiguous(memory_format=torch.channels_last) and not users:
            found.append(entry.target)
    return list(dict.fromkeys(found))


def is_faster_channels_last(program: Program) -> bool:
    """Time every distinct convolution of the program in both layouts, on made-up values, where the program runs."""
    groups: dict[str, list[fx.Node]] = {}
    for node in _convolutions(program):
        operands = [
            (tuple(t.meta["val"].shape), t.meta["val"].dtype, t.op == "placeholder") for t in node.all_input_nodes
        ]
        groups.setdefault(f"{operands} {node.args[3:]}", []).append(node)
    taken = [0.0, 0.0]
    with torch.no_grad(), same_random_state([node.meta["val"] for node in program.placeholders]):
        for nodes in groups.values():
            try:
                pair = [_seconds(nodes[0], layout) for layout in (torch.contiguous_format, torch.channels_last)]
            except torch.OutOfMemoryError:  # under a budget: the others decide
                continue
            taken = [total + len(nodes) * seconds for total, seconds in zip(taken, pair, strict=True)]
    return taken[1] < (1 - _WORTH) * taken[0]


def parameters_of_products(program: Program, movable: Iterable[str]) -> list[list[str]]:
    """Names of movable parameters, in groups that multiply the same value and are faster as one matrix, on CUDA."""
    movable, entries = frozenset(movable), {entry.name: entry for entry in program.inputs}
    found = []
    for group in products_of_one(program):
        names = [str(entries[product.weight.name].target) for product in group]
        if movable.issuperset(names) and group[0].weight.meta["val"].is_cuda:
            found.append((group, names))
    known: dict[str, bool] = {}
    faster = []
    with torch.no_grad(), same_random_state([node.meta["val"] for node in program.placeholders]):
        for group, names in found:
            nodes: list[Any] = [group[0].node.args[-2], *(product.weight for product in group)]
            operands = [node.meta["val"] for node in nodes]
            key = str([(tuple(value.shape), value.dtype) for value in operands])
            if key not in known:
                known[key] = _is_faster_joined(*map(made_like, operands))
            faster += [names] if known[key] else []
    return faster


def _is_faster_joined(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    whole = torch.cat(weights)
    joined = seconds_of(lambda: x @ whole.t(), x.device)
    return joined < (1 - _WORTH) * seconds_of(lambda: [x @ weight.t() for weight in weights], x.device)


def lay_out(model: nn.Module, names: Iterable[str], groups: Iterable[Sequence[str]] = ()) -> None:
    """Lay parameters out anew, one or one group at a time; their values and the objects stay.

    Args:
        model: whose parameters they are.
        names: of those to lay out channels-last; they keep their memory.
        groups: names of those to move side by side, into one block for each group.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in names:
            parameter = parameters[name]
            last = parameter.data.contiguous(memory_format=torch.channels_last)
            parameter.data = parameter.data.as_strided(last.shape, last.stride())
            parameter.data.copy_(last)
        if any(parameter.is_cuda for parameter in parameters.values()):
            torch.cuda.empty_cache()  # else blocks would come to lie behind what was freed, and hold it
        for group in groups:
            together = torch.cat([parameters[name].data.reshape(-1) for name in group])
            start = 0
            for name in group:
                shape, size = parameters[name].shape, parameters[name].numel()
                parameters[name].data = together[start : start + size].view(shape)
                start += size


def with_layout(program: Program, movable: Iterable[str], contiguous: Sequence[bool]) -> Program:
    """Settle how an inference program's weights are laid out, before anything else is done with it.

    Args:
        program: as captured.
        movable: the parameters that may be laid out anew; empty once that was done, or is not wanted.
        contiguous: which outputs were contiguous before that was done; empty when it was not.

    Returns:
        The program, with copies where an output that was contiguous is so no longer.

    Raises:
        LayoutNeeded: it is faster with weights laid out otherwise.
    """
    names = convolution_weights(program, movable)
    if not names or not is_faster_channels_last(program):
        names = []
    groups = parameters_of_products(program, movable)
    if names or groups:
        raise LayoutNeeded(names, groups, [_is_contiguous(value) for value in program.output_nodes])
    changed = [
        index
        for index, (value, before) in enumerate(zip(program.output_nodes, contiguous, strict=False))
        if before and not _is_contiguous(value)
    ]
    if not changed:
        return program
    new = program.copy()
    output, results = new.graph.output_node(), new.output_nodes
    for index in changed:
        with new.graph.inserting_before(output):
            layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
            results[index] = new.graph.call_function(aten.clone.default, (results[index],), layout)
    output.args = (tuple(results),)
    return new.finish()


def _is_contiguous(value: Any) -> bool:
    held = value.meta.get("val") if isinstance(value, fx.Node) else None
    return not isinstance(held, torch.Tensor) or held.is_contiguous()


def _convolutions(program: Program) -> list[fx.Node]:
    """The two-dimensional convolutions."""
    calls = [node for node in program.calls if node.target is aten.convolution.default]
    return [node for node in calls if node.all_input_nodes[0].meta["val"].dim() == 4]


def _seconds(node: fx.Node, layout: torch.memory_format) -> float:
    """The time of a convolution whose weight, and input where it is not the caller's, are laid out so."""
    values: dict[fx.Node, torch.Tensor] = {}
    for operand in node.all_input_nodes:
        given = operand is node.args[0] and operand.op == "placeholder"
        values[operand] = made_like(operand.meta["val"], None if given else layout)
    args = fx.map_arg(node.args, lambda operand: values[operand])
    device = next(iter(values.values())).device
    return seconds_of(lambda: aten.convolution.default(*args), device)


class JudgedByCost:
    """Decides by the costs of operators whether a training step is faster with its images channels last.

    Costs are those that plans are made of: measured once on the device, kept on disk, or estimated where a plan is made
    for a device that is not here. An operator that only one of both layouts was measured of is estimated in both.
    """

    def __init__(self, table: CostTable) -> None:
        """Take what knows the costs, and on which device."""
        self._table = table

    def __repr__(self) -> str:
        return "costs of operators"  # part of keys that other processes look for

    def may_gain(self, program: Program) -> bool:
        """Whether some convolution runs on CUDA in half precision, or in float32 with TF32 allowed."""
        target = self._table.target
        for node in program.calls:
            if node.target in CONVOLUTIONS:
                image = operands_of(node)[0]
                on_cuda = image.is_cuda if target is None else target.type == "cuda"
                if on_cuda and (image.dtype in HALVES or (image.dtype is torch.float32 and _allows_tf32())):
                    return True
        return False

    def __call__(self, before: Program, after: Program) -> str | None:
        """Return None where `after`, the same program laid out channels last, takes clearly less time; else why not."""
        old, new = ({node.name: node for node in self._table.placed(item).calls} for item in (before, after))
        changed = [name for name, node in new.items() if name not in old or key_of(node) != key_of(old[name])]
        nodes = [(old.get(name), new[name]) for name in changed]
        self._table.learn([node for pair in nodes for node in pair if node is not None])
        taken = [sum(times) for times in zip(*(self._seconds(*pair) for pair in nodes), strict=True)] or [0.0, 0.0]
        if taken[1] < (1 - _WORTH) * taken[0]:
            return None
        return f"channels last they take {1000 * taken[1]:.3g} ms with all copies, {1000 * taken[0]:.3g} ms as they are"

    def _seconds(self, old: fx.Node | None, new: fx.Node) -> tuple[float, float]:
        """What an operator takes in either layout; one that is added takes nothing without it."""
        if old is None:
            return 0.0, self._table.cost(new).seconds
        costs = self._table.cost(old), self._table.cost(new)
        if costs[0].timed == costs[1].timed:
            return (self._with_traffic(old, costs[0]), self._with_traffic(new, costs[1]))
        return self._estimated(old), self._estimated(new)

    def _with_traffic(self, node: fx.Node, cost: OperatorCost) -> float:
        """A measured time as it is; an estimated one with the operands that a convolution lays out anew by itself."""
        if cost.timed or node.target not in CONVOLUTIONS:
            return cost.seconds
        return self._estimated(node)

    def _estimated(self, node: fx.Node) -> float:
        device = self._table.device(node)
        moved = 2 * workspace_bytes(node) if node.target in CONVOLUTIONS else 0
        return seconds(node, device) + (moving_seconds(moved, device) if moved else 0.0)


def _allows_tf32() -> bool:
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]
