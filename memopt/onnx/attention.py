"""Finding attention that is written out as products, a softmax, a scale and a mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from memopt.graph.rewrite import Refused
from memopt.onnx.edit import Edit
from memopt.onnx.match import Match, find
from memopt.onnx.read import argument, attribute, constant, dims, is_standard, label, opset, producer, scalar
from memopt.onnx.symbolic import Symbols

_GUARD = (("Where", ("IsNaN", "p"), 0.0, "p"),)
TYPES = {ir.DataType.FLOAT, ir.DataType.FLOAT16}


@dataclasses.dataclass(frozen=True)
class Attention:
    """softmax(scale · q kᵀ + mask) v, all with four axes: batch, heads, length, features.

    Attributes:
        turned: kᵀ, whose last two axes are turned.
        nodes: what it is computed by, the last product first; q, kᵀ and v themselves left out.
    """

    q: ir.Value
    turned: ir.Value
    v: ir.Value
    mask: ir.Value | None
    scale: float
    nodes: tuple[ir.Node, ...]

    def outside_user(self) -> ir.Node | None:
        """A node inside whose result is read outside; see `memopt.onnx.match.Match`."""
        return Match({}, self.nodes).outside_user()


def attention(node: ir.Node, version: int) -> Attention | None:
    """The attention whose last product this MatMul is, in a model of this operator set; None when it is none.

    A guard that turns NaN in the softmax into 0 is left out: it matters for rows that are masked throughout.

    Raises:
        Refused: it has such a guard, and a mask that may hold infinity.
    """
    if not is_standard(node, "MatMul"):
        return None
    weights, v = node.inputs
    nodes = [node]
    guard = None if weights is None or weights.producer() is None else find(weights.producer(), _GUARD)  # type: ignore[arg-type]
    if guard is not None:
        nodes += guard.nodes
        weights = guard.values["p"]
    softmax = producer(weights, "Softmax")
    if softmax is None or v is None:
        return None
    rank = len(dims(softmax.outputs[0]) or ())
    # Before operator set 13 a Softmax went over its axis and all behind it, by default over all but the first.
    if rank != 4 or attribute(softmax, "axis", -1 if version >= 13 else 1) not in (-1, 3):
        return None
    nodes.append(softmax)
    added = producer(softmax.inputs[0], "Add")
    choices = [(softmax.inputs[0], None)] if added is None else [tuple(added.inputs), tuple(added.inputs)[::-1]]
    for scores, mask in choices:
        found = _scores(scores)
        if found is None:
            continue
        q, turned, scale, inner = found
        if any(len(dims(value) or ()) != 4 for value in (q, turned, v)) or q.dtype not in TYPES:
            return None
        if guard is not None and mask is not None and not _is_finite(mask):
            raise Refused("rows that are masked throughout give 0 here, and NaN in one operator")
        between = [] if added is None else [added]
        return Attention(q, turned, v, mask, scale, (*nodes, *between, *inner))
    return None


def _scores(value: ir.Value | None) -> tuple[ir.Value, ir.Value, float, list[ir.Node]] | None:
    nodes: list[ir.Node] = []
    value, scale = _unscaled(value, nodes)
    product = producer(value, "MatMul")
    if product is None:
        return None
    nodes.append(product)
    q, left = _unscaled(product.inputs[0], nodes)
    turned, right = _unscaled(product.inputs[1], nodes)
    return None if q is None or turned is None else (q, turned, scale * left * right, nodes)


def _unscaled(value: ir.Value | None, nodes: list[ir.Node]) -> tuple[ir.Value | None, float]:
    """What a Mul or Div by a number scales, and the factor."""
    node = producer(value, "Mul", "Div")
    if node is None:
        return value, 1.0
    for place in (1, 0) if node.op_type == "Mul" else (1,):
        number = scalar(argument(node, place))
        array = constant(argument(node, place))
        if number is None or array is None or array.ndim > 1:
            continue
        if node.op_type == "Mul" or number != 0:
            nodes.append(node)
            return node.inputs[1 - place], number if node.op_type == "Mul" else 1.0 / number
    return value, 1.0


def _is_finite(mask: ir.Value) -> bool:
    """Whether the mask is chosen between finite numbers, as far as a Where of constants tells."""
    node = producer(mask, "Where")
    while node is None and producer(mask, "Expand", "Unsqueeze", "Reshape", "Identity", "Cast") is not None:
        mask = mask.producer().inputs[0]  # type: ignore[union-attr,assignment]
        node = producer(mask, "Where")
    if node is None:
        return False
    numbers = [scalar(argument(node, place)) for place in (1, 2)]
    return all(number is not None and abs(number) < float("inf") for number in numbers)


def fuse_each(edit: Edit, fuse: Callable[[Edit, ir.Node, Attention, Symbols], None]) -> None:
    """Offer every attention of the main graph, in order; what `fuse` raises as Refused becomes a refusal."""
    symbols, version = Symbols(edit.model), opset(edit.model)
    for node in list(edit.model.graph):
        if node.graph is None or not is_standard(node, "MatMul"):
            continue
        try:
            found = attention(node, version)
            if found is not None:
                fuse(edit, node, found, symbols)
        except Refused as reason:
            edit.refuse(node, f"is attention, but {reason}")


def check(found: Attention, symbols: Symbols) -> None:
    """Raise Refused unless nothing inside is read outside, and the mask, of two to four axes, has the scores' sizes."""
    other = found.outside_user()
    if other is not None:
        raise Refused(f"the result of {label(other)} has other users, or is an output")
    shapes = [symbols.shapes.get(value) for value in (found.q, found.turned, found.v)]
    if any(shape is None or len(shape) != 4 for shape in shapes):
        raise Refused("the shapes of q, k and v are not known")
    q, turned, v = (shape for shape in shapes if shape is not None)
    if not (q[0] == turned[0] == v[0] and q[1] == turned[1] == v[1] and turned[3] == v[2] and q[3] == turned[2]):
        raise Refused("batch, heads and lengths of q, k and v are not known to agree")
    if found.mask is None:
        return
    mask = symbols.shapes.get(found.mask)
    if mask is None or not 2 <= len(mask) <= 4:
        raise Refused(f"the shape of its mask, {mask}, is not known to be that of the scores")
    batch, heads, *sizes = (1,) * (4 - len(mask)) + mask
    if tuple(sizes) != (q[2], v[2]) or batch not in (1, q[0]) or heads not in (1, q[1]):
        raise Refused(f"the shape of its mask, {mask}, is not known to be that of the scores")
