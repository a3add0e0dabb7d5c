"""Graphs as text: as they are after a pass, and what it changed as a unified diff."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memopt.difference.graph_diff import GraphNode, align
from memopt.difference.unified import unified
from memopt.pass_manager import PassRecord


def listing(nodes: Sequence[GraphNode], title: str) -> str:
    """A heading and one line per node, ending with a newline."""
    return "".join((f"# {title}\n", *(f"{node.line()}\n" for node in nodes)))


def change(before: Sequence[GraphNode], after: Sequence[GraphNode], name: str, where: str = "") -> str:
    """What pass `name` changed as a unified diff; a line that says so where it changed nothing."""
    text = unified(align(before, after, names=True), f"before {name}{where}", f"after {name}{where}")
    return text or f"# {name}{where} changed nothing\n"


def record_texts(records: Sequence[PassRecord], after: Collection[str], changed: bool) -> list[str]:
    """What was asked for of a compilation's passes, in order.

    Args:
        records: with their graphs.
        after: names of the passes after which the graph is to be shown.
        changed: whether to show what each pass that changed something changed.
    """
    several = any(record.program for record in records)
    texts = []
    for record in records:
        if record.before is None or record.after is None:
            continue
        where = f", graph {record.program}" if several else ""
        old, new = ([node.as_graph_node() for node in graph.nodes] for graph in (record.before, record.after))
        if changed and record.after is not record.before:
            texts.append(change(old, new, record.name, where))
        if record.name in after:
            texts.append(listing(new, f"after {record.name}{where}"))
    return texts
