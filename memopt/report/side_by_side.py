"""What a pass did to a graph, for people: rows side by side, grouped by module, with repeated blocks folded."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from memopt.difference.graph_diff import align
from memopt.graph.record import NO_STEP, GraphRecord, NodeRecord

Kind = Literal["same", "moved", "changed", "replaced", "removed", "added"]


@dataclasses.dataclass(frozen=True)
class Pair:
    """One line of two graphs side by side.

    Attributes:
        kind: as `graph_diff.Row` has it; "replaced": another node, which the pass says stands for the first.
        before, after: the nodes; None on the side where there is none.
        why: what differs in a changed node, in words.
    """

    kind: Kind
    before: NodeRecord | None
    after: NodeRecord | None
    why: str = ""

    @property
    def node(self) -> NodeRecord:
        """The node as it is now or, where it is gone, as it was."""
        found = self.after or self.before
        assert found is not None
        return found


@dataclasses.dataclass(frozen=True)
class Group:
    """The lines of one block of a model.

    Attributes:
        name: the module's path, with * for the number of each repeated block.
        phase: "forward" or "backward" in a training program.
        pairs: of the first of the blocks.
        blocks: paths of all blocks that changed in the same way.
    """

    name: str
    phase: str
    pairs: tuple[Pair, ...]
    blocks: tuple[str, ...]


def side_by_side(before: GraphRecord, after: GraphRecord) -> tuple[Pair, ...]:
    """Every node of both graphs once, in an order that both follow but for moved nodes.

    Nodes are known by their ids, which tell whose names were given again; what a pass says that a new node stands for
    puts it beside what it replaced.
    """
    alignment = align(
        [node.as_graph_node() for node in before.nodes], [node.as_graph_node() for node in after.nodes], names=True
    )
    pairs: list[Pair | None] = []
    removed: dict[str, int] = {}
    for row in alignment.rows:
        old = None if row.before is None else before.nodes[row.before]
        new = None if row.after is None else after.nodes[row.after]
        if old is not None and new is None:
            removed[old.id] = len(pairs)
        pairs.append(Pair(row.kind, old, new, row.why))
    for place, pair in enumerate(pairs):
        if pair is not None and pair.kind == "added" and pair.after is not None:
            stands_for = [removed[key] for key in pair.after.origins if key in removed]
            if stands_for:
                alike = [at for at in stands_for if _node_at(pairs, at).operator == pair.after.operator]
                chosen = (alike or stands_for)[-1]
                old = _node_at(pairs, chosen)
                pairs[place], pairs[chosen] = Pair("replaced", old, pair.after), None
                del removed[old.id]
    return tuple(pair for pair in pairs if pair is not None)


def _node_at(pairs: Sequence[Pair | None], place: int) -> NodeRecord:
    pair = pairs[place]
    assert pair is not None
    return pair.node


def block_of(module: str) -> str:
    """The path of the innermost numbered block that the module lies in; its first part where none is numbered."""
    parts = module.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else parts[0]


def any_block(module: str) -> str:
    """The path with * for each number: of all blocks that are alike."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def grouped(pairs: Sequence[Pair]) -> tuple[Group, ...]:
    """Fold the lines by block, and blocks that changed in the same way (or did not) into one.

    Two blocks are alike when their paths differ in numbers only, and their changed lines are of the same kinds,
    operators and places in the block, in the same order. A weight lies in the module that reads it first.
    """
    homes = _homes(pairs)
    blocks: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    first: dict[tuple[str, str], int] = {}
    for place, pair in enumerate(pairs):
        module, phase = homes.get(pair.node.id, (pair.node.module, pair.node.phase))
        key = phase, block_of(module)
        blocks[key].append(pair)
        if pair.kind != "same":
            first.setdefault(key, place)
    alike: dict[tuple[str, str, bool, tuple[tuple[str, ...], ...]], list[tuple[str, list[Pair]]]] = defaultdict(list)
    for phase, block in sorted(blocks, key=lambda key: first.get(key, len(pairs))):
        members = blocks[phase, block]
        pattern = any_block(block)
        changed = [pair for pair in members if pair.kind != "same"]
        signature = tuple(_signature(pair, block) for pair in changed or members)
        alike[phase, pattern, bool(changed), signature].append((block, members))
    groups = []
    for (phase, pattern, _, _), found in alike.items():
        block, members = found[0]
        name = pattern if len(found) > 1 else block
        groups.append(Group(name, phase, tuple(members), tuple(block for block, _ in found)))
    return tuple(groups)


def _homes(pairs: Sequence[Pair]) -> dict[str, tuple[str, str]]:
    """By id, module and phase of the first reader of each node that has no module of its own and does not run."""
    homeless = {pair.node.id for pair in pairs if not pair.node.module and pair.node.operator in NO_STEP}
    found: dict[str, tuple[str, str]] = {}
    for pair in pairs:
        for node in (pair.after, pair.before):
            for key in node.inputs if node is not None and node.module else ():
                if key in homeless and node is not None:
                    found.setdefault(key, (node.module, node.phase))
    return found


def _signature(pair: Pair, block: str) -> tuple[str, ...]:
    operators = [node.operator if node else "" for node in (pair.before, pair.after)]
    return (pair.kind, *operators, pair.node.module.removeprefix(block), pair.why)
