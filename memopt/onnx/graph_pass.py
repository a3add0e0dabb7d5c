"""OnnxPass and what it returns: the shape of memopt's passes, on ONNX graphs."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import onnx_ir as ir

from memopt.onnx.edit import Edit
from memopt.onnx.infer import infer_shapes
from memopt.pass_manager import Change, Refusal


@dataclasses.dataclass(frozen=True)
class OnnxPassResult:
    """What a pass returns: a model (the one it was given when nothing changed), and what it did and did not do."""

    model: ir.Model
    changes: tuple[Change, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class OnnxPass(abc.ABC):
    """One rewrite of an ONNX graph. Subclasses state the algebra, the cases and the refusals in their docstring.

    Attributes:
        name: the pass's name in reports and on the command line, in snake case.
        tolerance: 0.0 when results are bitwise equal; else how many times the float64 error of the given model the
            error of the rewritten model may reach (a floor of a few units in the last place is always allowed).
        float32_only: whether the operator that it makes is computed in float32 alone: a model that is to be put into
            lower precision does without the pass.
    """

    name: ClassVar[str]
    tolerance: ClassVar[float] = 0.0
    float32_only: ClassVar[bool] = False

    def run(self, model: ir.Model) -> OnnxPassResult:
        """Return the rewritten model. The one given is never edited; it is returned when nothing changed."""
        edit = Edit(model.clone())
        self.rewrite(edit)
        if not edit.changes:
            return OnnxPassResult(model, (), tuple(edit.refusals))
        infer_shapes(edit.model)
        return OnnxPassResult(edit.model, tuple(edit.changes), tuple(edit.refusals))

    @abc.abstractmethod
    def rewrite(self, edit: Edit) -> None:
        """Edit `edit.model`, a copy, through `edit`, which notes changes and refusals."""
