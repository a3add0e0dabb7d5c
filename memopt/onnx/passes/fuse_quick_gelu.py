"""A value times its own sigmoid becomes ONNX Runtime's own operator."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from memopt.onnx.edit import Edit
from memopt.onnx.match import Pattern, find
from memopt.onnx.read import is_standard, label
from memopt.onnx.runtime_pass import OnnxRuntimePass

_TYPES = {ir.DataType.FLOAT, ir.DataType.FLOAT16}
_FORMS: tuple[tuple[float, tuple[Pattern, ...]], ...] = (
    (1.0, (("Mul", "x", ("Sigmoid", "x")),)),
    (1.702, (("Mul", "x", ("Sigmoid", ("Mul", "x", 1.702))),)),
)


class FuseQuickGelu(OnnxRuntimePass):
    """x · sigmoid(f·x) becomes com.microsoft.QuickGelu, for f of 1 (SiLU, Swish) and 1.702; one result less is held.

    Refusals:
        - The sigmoid has other users, or is an output.
        - The type is none that the operator has kernels for.
    """

    name: ClassVar[str] = "fuse_quick_gelu"
    tolerance: ClassVar[float] = 4.0

    def rewrite(self, edit: Edit) -> None:
        """Walk each graph in order."""
        for graph in edit.graphs():
            for node in list(graph):
                if node.graph is not None and is_standard(node, "Mul"):
                    _fuse(edit, node)


def _fuse(edit: Edit, node: ir.Node) -> None:
    for alpha, patterns in _FORMS:
        match = find(node, patterns)
        if match is None:
            continue
        x, other = match.values["x"], match.outside_user()
        if other is not None:
            edit.refuse(node, f"is QuickGelu, but the result of {label(other)} has other users, or is an output")
        elif x.dtype not in _TYPES:
            edit.refuse(node, "is QuickGelu, but ONNX Runtime's is for floating-point numbers of 16 and 32 bits")
        else:
            names = match.names()
            new = edit.node(
                node, "QuickGelu", [x], {"alpha": alpha}, stem=f"{label(node)}_quick", domain="com.microsoft"
            )
            edit.replace(node.outputs[0], new.outputs[0])
            edit.erase(node)
            edit.change(f"{len(names)} nodes are QuickGelu", names, (label(new),))
        return
