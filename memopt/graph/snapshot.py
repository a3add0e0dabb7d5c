"""A program as the plain data that a report keeps of it: nodes, what they cost, and the memory they take over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import fx

from memopt.difference.program_nodes import graph_nodes
from memopt.graph.record import GraphRecord, NodeRecord, StorageRecord, identities, origins
from memopt.memory.aliasing import analyse
from memopt.memory.cost.roofline import bytes_moved, flops, makes_nothing
from memopt.memory.timeline import lifetimes
from memopt.program import Program

Changes = Sequence[tuple[Sequence[str], Sequence[str]]]

# Several records speak of one program: the pass that made it, the one that was given it, and the report.
_KNOWN: WeakKeyDictionary[Program, GraphRecord] = WeakKeyDictionary()


def snapshot(program: Program, history: Sequence[GraphRecord] = (), changes: Changes = ()) -> GraphRecord:
    """Put a program on record; one that is on record already keeps the ids that it has there.

    Args:
        program: read, not changed; none of its tensors is kept.
        history: the compilation's graphs so far, the one that the pass was given last, for the identity of nodes.
        changes: what the pass says of them: names of nodes before, and of those after that stand for them.
    """
    if program not in _KNOWN:
        _KNOWN[program] = _taken(program, history, changes)
    return _KNOWN[program]


def _taken(program: Program, history: Sequence[GraphRecord], changes: Changes) -> GraphRecord:
    nodes = graph_nodes(program)
    earlier = history[-1] if history else None
    ids = identities(nodes, history, changes)
    stands_for = origins(ids, earlier, changes)
    known = {} if earlier is None else {node.id: node for node in earlier.nodes}
    results = {ids[node.name]: node.result for node in nodes}
    made = []
    for node, source in zip(nodes, program.graph.nodes, strict=True):
        call = node.operator, tuple(ids[name] for name in node.inputs), node.text, node.result
        same = known.get(ids[node.name])
        if same is not None and _equal_calls(call, same, results, known):
            work = same.flops, same.moved
        else:
            work = _work(source)
        record = NodeRecord(
            ids[node.name],
            node.name,
            *call,
            node.module,
            node.source,
            source.meta["phase"].value if "phase" in source.meta else "",
            *work,
            stands_for.get(node.name, ()),
        )
        made.append(same if same == record else record)
    # A finished program holds the values of one run over the whole graph: views of it share their base's storage.
    aliasing = analyse(program, {node: node.meta["val"] for node in program.graph.nodes if "val" in node.meta})
    life = lifetimes(program, aliasing)
    storages = tuple(
        StorageRecord(ids[storage.producer.name], storage.nbytes, *span)
        for storage, span in zip(aliasing.storages, life.spans, strict=True)
        if span is not None
    )
    return GraphRecord(tuple(made), storages, life.forward_steps)


def _equal_calls(
    call: tuple[str, tuple[str, ...], str, str],
    before: NodeRecord,
    results: Mapping[str, str],
    known: Mapping[str, NodeRecord],
) -> bool:
    """Whether two calls do the same work: of one operator on equal arguments, operands and result of one type.

    Args:
        call: the operator of the one, its operands by id, its arguments in words, and the type of its result.
        before: the other.
        results: types of the operands of the one.
        known: the operands of the other.
    """
    if call != (before.operator, before.inputs, before.text, before.result):
        return False
    return all(name in known and known[name].result == results[name] for name in call[1])


def _work(node: fx.Node) -> tuple[int, int]:
    """Floating-point operations and bytes moved; nothing for nodes that only name or view what is there."""
    if node.op != "call_function" or makes_nothing(node):
        return 0, 0
    try:
        return flops(node), bytes_moved(node)
    except (AssertionError, ValueError):  # some of torch's formulas refuse what the operator takes: grouped heads
        return 0, bytes_moved(node)
