"""EliminateDead: remove what nothing reads."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from memopt.graph.rewrite import drop_unused_constants
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.program import InputKind, Program, is_effectful, is_random


class EliminateDead(Pass):
    """Remove operations whose results nothing reads, and constants that nothing reads any more.

    Algebra: functional operations compute their results and nothing else, so one that no output depends on changes no
    output by its absence. Numbers stay bitwise equal; the order of the others stays.

    Cases:
        1. A call node without users is removed, then what only it read, back to the inputs.
        2. An attribute (the body of a higher-order operator) that no node reads any more is removed.
        3. A CONSTANT input without users is removed with its tensor: the program owns it, no caller passes it.

    Refusals:
        - A node that draws random numbers stays: without its draw every later draw would be another one.
        - A node with an effect (an assertion, a collective, a higher-order or unknown operator) stays.
        - Inputs of all other kinds stay: they are the calling convention.
    """

    name: ClassVar[str] = "eliminate_dead"

    def run(self, program: Program) -> PassResult:
        """Return the program without its dead nodes; one change that lists them all."""
        dead, refusals = _dead(program)
        if not dead and not _has_unused_constant(program):
            return PassResult(program, (), tuple(refusals))
        new = program.copy()
        for node in reversed(list(new.graph.nodes)):
            if node.name in dead:
                new.graph.erase_node(node)
        new, constants = drop_unused_constants(new)
        names = (*(node.name for node in program.graph.nodes if node.name in dead), *constants)
        summary = f"removed {len(dead)} dead nodes and {len(constants)} unused constants"
        return PassResult(new.finish(), (Change(summary, names),), tuple(refusals))


def _dead(program: Program) -> tuple[set[str], list[Refusal]]:
    """Names of the nodes to remove, and the unread nodes that must stay."""
    dead: set[str] = set()
    refusals: list[Refusal] = []
    for node in reversed(list(program.graph.nodes)):
        if node.op not in ("call_function", "get_attr") or any(user.name not in dead for user in node.users):
            continue
        reason = _must_stay(node) if node.op == "call_function" else None
        if reason is None:
            dead.add(node.name)
        elif node.meta["val"] is not None:  # an assertion has no value: nobody was ever to read it
            refusals.append(Refusal(node.name, reason))
    return dead, refusals[::-1]


def _must_stay(node: fx.Node) -> str | None:
    if is_random(node):
        return "nothing reads it, but it draws random numbers: without it every later draw would change"
    if is_effectful(node):
        return f"nothing reads it, but {node.target} does more than compute its value"
    return None


def _has_unused_constant(program: Program) -> bool:
    constants = {entry.name for entry in program.inputs if entry.kind is InputKind.CONSTANT}
    return any(node.name in constants and not node.users for node in program.placeholders)
