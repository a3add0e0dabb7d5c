"""Whether two storages of a program may become one: the caller must not notice, and memory must not be held longer."""

from __future__ import annotations

from torch import fx

from memopt.graph.rewrite import returned_storages, storages
from memopt.program import Phase, Program
from memopt.torch_compat.operators import HigherOrderOperator


class Sharing:
    """The storages of a program with what a rewrite needs to know to let a copy share the storage of its original.

    Read once from the program, then kept up to date through `merge`; each question takes constant time.
    """

    def __init__(self, program: Program) -> None:
        self._nbytes: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._inputs: set[int] = set()
        self._forward: set[int] = set()
        self._read_backward: set[int] = set()
        self._returned = returned_storages(program)
        self._merged: dict[int, int] = {}
        for position, node in enumerate(program.graph.nodes):
            made = {key: size for key, size in storages(node).items() if key not in self._nbytes}
            self._nbytes.update(made)
            if node.op == "placeholder":
                self._inputs |= made.keys()
            elif node.meta.get("phase") is Phase.FORWARD:
                self._forward |= made.keys()
            for key in (key for argument in node.all_input_nodes for key in storages(argument)):
                self._last[key] = position
                if node.meta.get("phase") is Phase.BACKWARD:
                    self._read_backward.add(key)

    def reason_against(self, copy: fx.Node, original: fx.Node) -> str | None:
        """Why the copy's storage must not become the original's; None when it may.

        Both values must be single tensors.
        """
        mine, theirs = self._storage(copy), self._storage(original)
        saved = self._is_saved(mine)
        if mine in self._returned and theirs in self._inputs:
            return f"it reaches the caller, and would share memory with the input behind {original.name}"
        if mine in self._returned and theirs in self._returned:
            return "two outputs would share memory"
        if mine in self._returned and self._is_saved(theirs):
            return "it reaches the caller, and would share memory with a tensor that backward reads"
        if saved and theirs in self._returned:
            return "backward reads it, and it would share memory with an output"
        if saved and theirs in self._inputs:
            return f"backward reads it, and it would share memory with the input behind {original.name}"
        if any(isinstance(user.target, HigherOrderOperator) for user in copy.users):
            return "a higher-order operator reads it"
        larger = self._nbytes[theirs] > self._nbytes[mine]
        if larger and theirs not in self._inputs and self._last[theirs] < self._last.get(mine, -1):
            return f"{self._nbytes[theirs]} bytes would stay alive in place of the copy's {self._nbytes[mine]}"
        return None

    def merge(self, copy: fx.Node, original: fx.Node) -> None:
        """Record that the copy's storage became the original's."""
        mine, theirs = self._storage(copy), self._storage(original)
        self._merged[mine] = theirs
        self._last[theirs] = max(self._last[theirs], self._last.get(mine, -1))
        for flagged in (self._returned, self._read_backward):
            if mine in flagged:
                flagged.add(theirs)

    def _storage(self, node: fx.Node) -> int:
        (key,) = storages(node)
        while key in self._merged:
            key = self._merged[key]
        return key

    def _is_saved(self, key: int) -> bool:
        return key in self._forward and key in self._read_backward
