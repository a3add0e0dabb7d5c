"""What Inductor's kernels fuse away: values that are computed inside the kernels of their readers, and never stored.

Inductor writes a value of one element at a time to memory only where it must: a library call reads it, it leaves the
graph, or computing it in each of its readers would read or compute too much. A plan has to know: such values take no
bytes, and recomputing them in backward takes no pass over memory of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from memopt.inductor.kinds import DRAWING, REDUCTIONS, SEED, is_generated, is_inlined, kinds_of
from memopt.inductor.prefusion_order import arrange
from memopt.inductor.write_over import write_over
from memopt.memory.cost.devices import Device
from memopt.memory.cost.roofline import moving_seconds, result_bytes, touched_bytes
from memopt.memory.cost.table import CostTable, OperatorCost
from memopt.patterns.overwrites import written_over
from memopt.program import Program, is_any_view, tensors_of
from memopt.torch_compat.inductor_settings import most_reads_inside, threshold
from memopt.torch_compat.operators import operator_name

aten, prims = torch.ops.aten, torch.ops.prims

# These write into a copy of their first operand, which is computed there.
_OVERWRITES = {
    aten.index_put.default, aten._unsafe_index_put.default, aten._unsafe_masked_index_put_accumulate.default,
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two,
}  # fmt: skip
# A value that is read again later is stored where computing it then would read so many times its size.
_MUCH = 2
# A value is stored wherever it is read again later if it has at most so many bytes, and is so much smaller than the
# program's largest: a number for each row, say.
_SMALL, _SMALLER = 2**20, 256
# One number of Philox's ten rounds, in the time of so many float32 operations. It is about 80 instructions on integers,
# of which a processor does one for four of those. A GPU does most of them while it waits for memory: drawn again in
# place of a mask that is read, 16.8 million of them took kernels of an H100 6 to 25 µs.
_OPERATIONS_A_DRAW = {"cuda": 60, "cpu": 320}
# Where values are reused on CPU, these are not computed twice.
_DEAR_ON_CPU = {"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"}
_NOT_INLINED = {aten.as_strided.default, aten.view.dtype}
_NONE: frozenset[fx.Node] = frozenset()


class InductorFusion:
    """Marks the values that Inductor does not store, and prices what is left as the kernels that it makes of it."""

    def __init__(self, table: CostTable) -> None:
        """Take the table that knows the device's speed."""
        self._table = table

    def arrange(self, program: Program) -> Program:
        """Return the program with its backward graph in an order in which kernels fuse well."""
        return arrange(program)

    def mark(self, program: Program) -> Program:
        """Return the program with `meta["fused"]` on the values that are computed inside the kernels of their readers.

        `meta["kernel"]` is on what is stored, but by a kernel that Inductor generates: what may be fused with others.
        `meta["stored"]` is on what Inductor would not store by itself, and should: see `realize`. `meta["inplace"]` is
        on sums that Inductor writes over the sum so far (see `_continues_a_sum`), and tables with rows added to them.

        The rules are those of Inductor's lowering (`StorageBox`, `GraphLowering.run_node`): readers
        that need memory, values that the caller gets, and the thresholds on reads and operations above which a value
        is stored. Marks of an earlier call are forgotten.
        """
        new = program.copy()
        for node in new.graph.nodes:
            for mark in ("fused", "kernel", "stored", "inplace"):
                node.meta.pop(mark, None)
        mutated = new.mutated
        fragile = [node for node in new.placeholders if node.name in mutated]
        marker = _Marker(new.graph, fragile)
        fused = marker.fused()
        if write_over(new, marker.reads, marker.calls, fused):
            marker = _Marker(new.graph, fragile)
            fused = marker.fused()
        for node in new.calls:
            if node in fused:
                node.meta["fused"] = True
            elif marker.inlined[node] or node.target in REDUCTIONS:
                node.meta["kernel"] = True
            if node in marker.stored:
                node.meta["stored"] = True
            over = written_over(node)
            if _continues_a_sum(node) or (over is not None and over not in fused):
                node.meta["inplace"] = 0
        return new

    def costs(self, program: Program, costs: Mapping[str, OperatorCost]) -> dict[str, OperatorCost]:
        """Costs by node name: fused values take nothing, generated kernels the time to move what they touch.

        Args:
            program: a program with marks.
            costs: what the operators take one by one.
        """
        found = dict(costs)
        reads: dict[fx.Node, frozenset[fx.Node]] = {}
        devices: dict[torch.device, Device] = {}
        drawn = _drawn(program.graph.nodes)
        for node in program.graph.nodes:
            inside = bool(node.meta.get("fused")) or is_any_view(node)
            reads[node] = _gathered(node.all_input_nodes, reads) if inside else frozenset((node,))
            if node.op != "call_function" or node.name not in found:
                continue
            if node.meta.get("fused"):
                found[node.name] = dataclasses.replace(found[node.name], seconds=0.0, workspace_bytes=0)
            elif found[node.name].seconds and (node.meta.get("kernel") or is_generated(node)):
                operands = _gathered(node.all_input_nodes, reads)
                moved = sum(touched_bytes(tensor) for operand in operands for tensor in tensors_of(operand))
                moved += result_bytes(node)
                place = tensors_of(node)[0].device
                if place not in devices:
                    devices[place] = self._table.device(node)
                device = devices[place]
                time = moving_seconds(moved, device)
                numbers = sum(drawn[item].meta["val"].numel() for item in node.all_input_nodes if item in drawn)
                time += numbers * _OPERATIONS_A_DRAW[device.type] / device.flops["float32"]
                found[node.name] = dataclasses.replace(found[node.name], seconds=time, workspace_bytes=0)
        return found


def realize(module: fx.GraphModule) -> None:
    """Have Inductor store what a plan counts on as stored, by its own mark for that.

    So is an operand of a concatenation in another layout than torch's own, channels last say, that something else reads
    as well. Inductor would write it into its part of the result, which is laid out as torch does for that, converted
    for what reads it, and there as a whole as long as the part is needed.
    """
    for node in module.graph.nodes:
        if node.meta.get("stored"):
            node.meta["inductor_realize_to_strides"] = True
        if node.target is aten.cat.default and not node.meta["val"].is_contiguous():
            for operand in node.all_input_nodes:
                if len(operand.users) > 1 and is_inlined(operand):
                    operand.meta["inductor_realize_to_strides"] = True


def stored_reads(
    graph: fx.Graph,
) -> tuple[Mapping[fx.Node, frozenset[fx.Node]], Collection[fx.Node], Collection[fx.Node]]:
    """What is stored of a graph as Inductor would have it: for the sake of a later kernel what a plan has marked only.

    Returns:
        What is read of what is stored where a node is read, the nodes that are not stored, and the library calls.
    """
    marker = _Marker(graph, ())
    fused = marker.fused(store=False)
    return marker.reads, fused, marker.calls


class _Marker:
    def __init__(self, graph: fx.Graph, fragile: Collection[fx.Node]) -> None:
        self.nodes, self.fragile = [*graph.nodes], set(fragile)
        self.given = {node: node.all_input_nodes for node in self.nodes}
        self.alone = {node: frozenset((node,)) for node in self.nodes}
        sizes = (touched_bytes(tensor) for node in self.nodes for tensor in tensors_of(node))
        self.small = min(_SMALL, max(sizes, default=0) // _SMALLER)
        self.view, self.inlined, self.calls = kinds_of(self.nodes)
        drawn = _drawn(self.nodes)
        self.settles = {node for node in self.nodes if drawn and self.inlined[node] and _settles_draws(node, drawn)}
        self.reads: dict[fx.Node, frozenset[fx.Node]] = {}
        # The same, but through what would be stored for the sake of later kernels and is on its way to one reader here.
        self.through: dict[fx.Node, frozenset[fx.Node]] = {}
        # As Inductor counts for its thresholds, by which a value may be a buffer of its own that lives in one kernel.
        self.counted: dict[fx.Node, frozenset[fx.Node]] = {}
        self.work: dict[fx.Node, frozenset[fx.Node]] = {}  # fused values and itself: what one element takes to compute
        self.inlining: dict[fx.Node, bool] = {}
        self.ends: dict[fx.Node, bool] = {}  # whether one kernel reads it, which stores a value of the same size
        self.found: dict[fx.Node, None] | None = None  # what the last round found not to be stored
        self.stored: set[fx.Node] = set()  # what is stored only for the sake of kernels after a library call
        self.marked = {node for node in self.nodes if node.meta.get("stored")}  # what is stored in any case
        # Library calls before it, and ends of graphs: kernels are fused between two such only.
        self.window: dict[fx.Node, int] = {}
        self.last: dict[fx.Node, int] = {}  # the last window in which a kernel reads it, or what is computed from it
        self.limits: dict[bool, tuple[int, int]] = {}  # Inductor's thresholds on operations and reads, on CPU or not

    def fused(self, *, store: bool = True) -> dict[fx.Node, None]:
        """The values that are not stored, views of such values included; `store`: but for a later kernel's sake."""
        calls, before = 0, None
        for node in self.nodes:
            phase = node.meta.get("phase", before)
            calls += phase is not before  # no kernel is part of both graphs
            before, self.window[node] = phase, calls
            calls += node in self.calls
        for node in reversed(self.nodes):
            self.inlining[node] = self._readers_inline(node)
            self.ends[node] = self._ends_in_one_kernel(node)
        self._find_last_windows()
        in_vain = set() if store else set(self.nodes)
        while True:
            found = self._round(in_vain)
            self._find_last_windows()
            # Of a chain only the end has to be stored, once it is known to be.
            more = {node for node in self.stored - self.marked if self.last[node] <= self.window[node]}
            if not more:
                return found
            in_vain |= more

    def _find_last_windows(self) -> None:
        view, window, found, last = self.view, self.window, self.found, self.last
        for node in reversed(self.nodes):
            latest = 0
            for user in node.users:
                # Whether it is computed inside of its own readers, as far as is known.
                inside = (self.inlined[user] and self.inlining[user]) if found is None else user in found
                latest = max(latest, window[user], last[user] if inside or view[user] else 0)
            last[node] = latest

    def _round(self, in_vain: set[fx.Node]) -> dict[fx.Node, None]:
        found: dict[fx.Node, None] = {}
        self.stored.clear()
        for node in self.nodes:
            given, alone, work = self.given[node], self.alone[node], _NONE
            if shown := self.view[node]:
                fused, counted = given[0] in found, _gathered(given, self.counted)
                work = self._work_of(node) if fused else _NONE
            else:
                counted, cheap = alone, False
                fused = self.inlined[node] and self.inlining[node]
                fused = fused and not self._is_fragile(node) and node not in self.settles
                if fused:
                    counted, work = _gathered(given, self.counted), self._work_of(node)
                    cheap = self._is_cheap(node, counted, work)
                    fused = cheap or self.ends[node]
                if fused and (node in self.marked or (node not in in_vain and self._is_worth_storing(node))):
                    self.stored.add(node)
                    fused = cheap = False
                if not cheap:
                    counted, work = alone, _NONE
            self.counted[node], self.work[node] = counted, work
            self.reads[node] = _gathered(given, self.reads) if fused or shown else alone
            passed = node in self.stored and node not in self.marked and self._is_on_its_way(node)
            self.through[node] = _gathered(given, self.through) if fused or shown or passed else alone
            if fused:
                found[node] = None
        self.found = found
        return found

    def _readers_inline(self, node: fx.Node) -> bool:
        """Whether all that reads the node, views looked through, computes its operands element by element."""
        if not node.users:
            return False
        for user in node.users:
            if user.op != "call_function" or user.target in _NOT_INLINED:
                return False
            if self.view[user]:
                if not self.inlining[user] and user.users:
                    return False
            elif not self.inlined[user] and user.target not in REDUCTIONS and not _is_overwritten(node, user):
                return False
        return True

    def _ends_in_one_kernel(self, node: fx.Node) -> bool:
        """Whether all that reads the node, views looked through, can be part of its own kernel.

        However much it takes to compute, it is in no memory then: Inductor's scheduler makes one kernel of what is
        computed element by element, of as many elements, between the same two library calls, and drops a buffer that
        this kernel alone reads.
        """
        if not node.users or not self._has_elements(node):
            return False
        for user in node.users:
            if self.window[user] != self.window[node] or user.op != "call_function":
                return False
            if self.view[user]:
                if not self.ends[user]:
                    return False
                continue
            stores = self.inlined[user] and (not self.inlining[user] or self.ends[user])
            if not stores or user.meta["val"].numel() != node.meta["val"].numel():
                return False
        return True

    def _has_elements(self, node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.Tensor) and (self.view[node] or self.inlined[node])

    def _is_fragile(self, node: fx.Node) -> bool:
        """Whether it reads what the program overwrites: computed later it would see what is written there."""
        return bool(self.fragile) and not self.fragile.isdisjoint(_gathered(self.given[node], self.reads))

    def _is_cheap(self, node: fx.Node, operands: Collection[fx.Node], work: Collection[fx.Node]) -> bool:
        """Whether Inductor computes the node in each kernel that reads it, by its thresholds on reads and work."""
        on_cpu = tensors_of(node)[0].device.type == "cpu"
        if on_cpu not in self.limits:
            self.limits[on_cpu] = threshold("opcount", on_cpu), threshold("acc_reads", on_cpu)
        large, most = self.limits[on_cpu]
        size = len(work) + len(operands) + sum(_constants(item) for item in work)
        if len(operands) > most or size > large:
            return False
        if len(node.users) < 2:
            return True
        dear = on_cpu and any(operator_name(item.target) in _DEAR_ON_CPU for item in work)
        return not dear and len(operands) <= most_reads_inside()

    def _is_on_its_way(self, node: fx.Node) -> bool:
        """Whether all that is read of the node is one value computed beside it, which may be stored in its place."""
        if len(node.users) != 1:
            return False
        (user,) = node.users
        if self.window[user] != self.window[node]:
            return False
        return self._is_on_its_way(user) if self.view[user] else self.inlined[user] and self.inlining[user]

    def _is_worth_storing(self, node: fx.Node) -> bool:
        """Whether a kernel after a library call had better read the node than compute it.

        1. It would read much more than the node itself: a sum of residual branches, say, is read as it is; else all
           that was added up has to be kept and read. So is what a rectifier lets through of such a sum, and not the sum
           and the mask that it is made of.
        2. The node is small: a number for each row, say. Keeping it costs nothing, and a kernel that computes too much
           is cut in two by Inductor, at whatever large value it was computing.

        What is computed of nothing in memory, the numbers of columns say, takes longer to read.
        """
        if self.last[node] <= self.window[node] or node.target is SEED:
            return False
        operands = _gathered(self.given[node], self.through)
        if not operands:
            return False
        own = result_bytes(node)
        read = sum(
            min(touched_bytes(tensor), tensor.element_size() * node.meta["val"].numel())
            for operand in operands
            for tensor in tensors_of(operand)
        )
        return bool(own <= self.small or read >= _MUCH * own)

    def _work_of(self, node: fx.Node) -> frozenset[fx.Node]:
        own = _NONE if self.view[node] else self.alone[node]
        return own.union(*[self.work[argument] for argument in self.given[node]])


def _gathered(given: Sequence[fx.Node], reads: Mapping[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    """The stored values that computing a node of these operands reads."""
    if len(given) == 1:
        return reads[given[0]]
    return _NONE.union(*[reads[argument] for argument in given])


def _continues_a_sum(node: fx.Node) -> bool:
    """Whether the node adds to a running sum that is in memory, and read by nothing else: its kernel writes over it."""
    running = node.args[0] if node.target is aten.add.Tensor else None
    while isinstance(running, fx.Node) and running.target is aten.add.Tensor and running.meta.get("fused"):
        running = running.args[0] if len(running.users) == 1 else None  # several are added to it by one kernel
    if not isinstance(running, fx.Node) or running.target is not aten.as_strided.default or node.meta.get("fused"):
        return False
    (total,) = running.all_input_nodes
    mine, before = node.meta["val"], total.meta["val"]
    if len(running.users) > 1 or len(total.users) > 1 or not total.meta.get("kernel"):
        return False
    if total.meta.get("phase") is not node.meta.get("phase"):
        return False
    return bool((mine.shape, mine.stride(), mine.dtype) == (before.shape, before.stride(), before.dtype))


def _is_overwritten(node: fx.Node, user: fx.Node) -> bool:
    """Whether the user writes into a copy of the node, and reads it for that only."""
    rest: list[fx.Node] = []
    fx.map_arg((user.args[1:], user.kwargs), rest.append)
    return user.target in _OVERWRITES and user.args[:1] == (node,) and node not in rest


def _settles_draws(node: fx.Node, drawn: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether the node makes something else of random numbers: a mask, say, which is smaller than what was drawn.

    It costs no more memory to keep than the numbers, and drawing these again costs more time than to read it.
    """
    given = node.all_input_nodes
    return any(map(drawn.__contains__, given)) and (len(given) > 1 or node.meta["val"].dtype is torch.bool)


def _drawn(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Of values that are random numbers, cast at most, what draws them: in the kernel of the node that reads one."""
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.target is DRAWING:
            found[node] = node
        elif found and (given := node.all_input_nodes) and given[0] in found and _passes_on(node):
            found[node] = found[given[0]]
    return found


def _passes_on(node: fx.Node) -> bool:
    return (
        len(node.all_input_nodes) == 1
        and node.meta["val"].dtype is not torch.bool
        and (is_any_view(node) or is_inlined(node))
    )


def _constants(node: fx.Node) -> int:
    return sum(isinstance(value, (int, float)) for value in node.args)
