"""Passes that are wrong on purpose, at one place among many right ones; for `memopt bisect`."""

from __future__ import annotations

import torch

import memopt
from memopt.pass_manager import Change, Pass, PassResult
from memopt.program import Phase, Program

WRONG = 3


class SwapAdds(Pass):
    """Swaps the operands of every addition of the forward phase; the fourth one becomes a subtraction."""

    name = "swap_adds"
    tolerance = 1.0

    def __init__(self, *, says: bool = True, wrong: int = WRONG) -> None:
        self.says, self.wrong = says, wrong

    def run(self, program: Program) -> PassResult:
        new, changes = program.copy(), []
        adds = [
            node
            for node in new.calls
            if node.target is torch.ops.aten.add.Tensor and node.meta.get("phase") is not Phase.BACKWARD
        ]
        for index, node in enumerate(adds):
            with new.graph.inserting_before(node):
                if index == self.wrong:
                    made = new.graph.call_function(torch.ops.aten.sub.Tensor, node.args)
                else:
                    made = new.graph.call_function(torch.ops.aten.add.Tensor, node.args[::-1])
            made.meta = {key: value for key, value in node.meta.items() if key != "inplace"}
            node.replace_all_uses_with(made)
            new.graph.erase_node(node)
            names = ((node.name,), (made.name,)) if self.says else ((), ())
            changes.append(Change(f"swapped {node.name}" if self.says else "swapped something", *names))
        return PassResult(new.finish(), tuple(changes)) if changes else PassResult(program)


TWELVE = (*memopt.INFERENCE[:6], SwapAdds(), *memopt.INFERENCE[6:])
SILENT = (SwapAdds(says=False), *memopt.INFERENCE)
TRAINED = (*memopt.TRAINING[:3], SwapAdds(), *memopt.TRAINING[3:])
