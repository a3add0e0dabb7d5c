"""SplitRecurrence: backward goes through recurrent layers piece by piece of the sequence."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from memopt.graph.rewrite import Refused
from memopt.memory.cost.scratch import workspace_bytes
from memopt.memory.timeline import timeline
from memopt.pass_manager import Change, Pass, PassResult, attempt_each
from memopt.program import Program, argument, base_of, tensors_of
from memopt.torch_compat.recurrent_layers import RECURRENT, RECURRENT_BACKWARD

_PIECES = 4
_MORE = 4  # times as many, where that is still too much
_SHARE = 1 / 16  # of the step's peak: what backward through a layer takes by itself, to be split
_LAST: dict[Any, int] = {RECURRENT: 9, RECURRENT_BACKWARD: 13}  # the place of the number of pieces among the arguments


class SplitRecurrence(Pass):
    """Run recurrent layers on one piece of the sequence after the other, the last one first in backward.

    Algebra: the states after step t and the inputs after it are all that later steps depend on. So a layer may run from
    saved states in the middle of a sequence, and the gradients of its weights are sums over pieces. What backward
    computes anew, and saves meanwhile, is then there for one piece at a time.

    Cases:
        1. A layer of one direction: the states between the pieces are saved in forward.
        2. Of two directions: one after the other, the second from the end of the sequence.
        3. A sequence shorter than the number of pieces: pieces of one step.

    Numbers: the same operators on shorter sequences; gradients of weights are summed in another order, and products of
    all steps at once may round otherwise: hence the tolerance.

    Refusals: several layers of two directions in one operator, as the second one needs both ends of the sequence at
    once; a length that is a symbol; a layer whose backward takes little of what the step holds at its peak. Inference
    programs are returned as they are.
    """

    name: ClassVar[str] = "split_recurrence"
    tolerance: ClassVar[float] = 4.0
    lowers_floor: ClassVar[bool] = True

    def __init__(self, pieces: int = _PIECES, *, share: float = _SHARE) -> None:
        """Set the number of pieces.

        Args:
            pieces: how many; no more than there are steps in the sequence.
            share: of the step's peak, what backward through a layer takes at least, if it is split.

        Raises:
            ValueError: fewer than two pieces.
        """
        if pieces < 2:
            raise ValueError(f"pieces is {pieces}: at least 2 are needed")
        self.pieces, self.share = pieces, share

    @property
    def key(self) -> str:
        """With the number of pieces, where that is not the usual one."""
        return self.name if self.pieces == _PIECES else f"{self.name}:{self.pieces}"

    @property
    def deeper(self) -> Pass | None:
        """More pieces."""
        return SplitRecurrence(_MORE * _PIECES, share=self.share) if self.pieces == _PIECES else None

    def run(self, program: Program) -> PassResult:
        """Return the program with layers in pieces, one change for each; or the program itself and the reasons."""
        if not program.training or not any(node.target is RECURRENT_BACKWARD for node in program.calls):
            return PassResult(program)
        least = timeline(program).peak_bytes * self.share
        new = program.copy()

        def split(node: fx.Node) -> Change | None:
            return self._split(node, least) if node.target is RECURRENT_BACKWARD else None

        changes, refusals = attempt_each(new.calls, split)
        return PassResult.of(program, new, changes, refusals)

    def _split(self, node: fx.Node, least: float) -> Change:
        layer = _layer_of(node)
        length = tensors_of(layer)[0].shape[0]
        if argument(node, "bidirectional") and argument(node, "layers") != 1:
            raise Refused("several layers of two directions run as one operator: none of it is done in pieces")
        if not isinstance(length, int) or length < 2:
            raise Refused(f"a sequence of length {length} has no pieces")
        if (own := workspace_bytes(node)) < least:
            raise Refused(f"about {own} bytes are taken within it: recomputing lowers the rest")
        pieces = min(self.pieces, length)
        for one in (layer, node):
            one.args = (*one.args[: _LAST[one.target]], pieces)
            one.meta.pop("eager_input_vals", None)  # Inductor lays out as many arguments as stand there
        names = layer.name, node.name
        return Change(f"{layer.name}: a sequence of {length} steps in {pieces} pieces", names, names)


def _layer_of(node: fx.Node) -> fx.Node:
    """The layer in forward whose backward a node is."""
    kept: Any = node.args[2]
    layer: fx.Node = base_of(kept[0]).args[0]  # type: ignore[assignment]
    return layer
