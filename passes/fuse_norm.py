"""FuseNorm: LayerNorm and RMSNorm written by hand become PyTorch's fused operators."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.relayout import layout_is_unseen, replace_relaid
from memopt.graph.rewrite import Refused, erase_unused, fake_value
from memopt.pass_manager import Change, Pass, PassResult, attempt_each
from memopt.patterns.elements import drop_metadata_checks, shape
from memopt.patterns.norms import Norm, norm_of
from memopt.program import Program
from memopt.torch_compat.dispatch import has_kernel

aten = torch.ops.aten


class FuseNorm(Pass):
    """Let one operator compute a normalisation, so that no centred, squared or normalised tensor is stored.

    Algebra: LayerNorm (Ba et al., 2016) is w·(x - mean) / sqrt(mean of (x - mean)² + eps) + b, RMSNorm (Zhang and
    Sennrich, 2019) is w·x / sqrt(mean of x² + eps). The operators sum in float32 or wider and round once.

    Cases:
        1. The quotient as division by sqrt, or product with rsqrt, with 1/sqrt or with a power; the variance as
           `var(correction=0)` or as the mean of squares of what is divided; means with kept or re-inserted dimensions.
        2. x cast to float32 first and the quotient cast back (Llama, T5): the operator reads and writes x's own dtype.
        3. A weight, and for LayerNorm a bias, of the normalised sizes that follow are taken in.

    Refusals:
        - The normalised dimensions are not the last ones.
        - The variance is the unbiased one; eps is missing, or added to the deviation instead of the variance.
        - A statistic or the centred tensor is read by something else.
        - The result would be laid out otherwise, and something sees that.
        - RMSNorm where PyTorch has no kernel of its own: on the CPU `_fused_rms_norm` is the same operations again.

    Training programs are returned unchanged.
    """

    name: ClassVar[str] = "fuse_norm"
    tolerance: ClassVar[float] = 4.0

    def run(self, program: Program) -> PassResult:
        """Return the program with each normalisation fused that can be."""
        if program.training:
            return PassResult(program)
        new = program.copy()

        def fuse(node: fx.Node) -> Change | None:
            found = norm_of(new, node)
            return None if found is None else _fuse(new, found)

        changes, refusals = attempt_each(new.calls, fuse)
        return PassResult.of(program, new, changes, refusals)


def _fuse(program: Program, norm: Norm) -> Change:
    """Rewrite one normalisation. Raises Refused before anything is edited."""
    device = norm.x.meta["val"].device.type
    if not norm.centred and not _has_kernel("aten::_fused_rms_norm", device):
        raise Refused(f"RMSNorm by hand, but on {device} PyTorch has no fused operator for it")
    if norm.x.meta["val"].dtype != norm.result.meta["val"].dtype:
        raise Refused("a norm by hand, but its result is of another dtype than what is normalised")
    made: list[fx.Node] = []

    def call(target: Any, args: tuple[Any, ...], name: str | None = None) -> fx.Node:
        with program.graph.inserting_before(norm.result):
            node = program.graph.create_node("call_function", target, args, {}, name)
        node.meta = {**norm.result.meta, "val": fake_value(program, target, args)}
        made.append(node)
        return node

    def parameter(node: fx.Node | None) -> fx.Node | None:
        if node is None or shape(node) == norm.sizes:
            return node
        return call(aten.view.default, (node, list(norm.sizes)))

    weight, bias, sizes = parameter(norm.weight), parameter(norm.bias), list(norm.sizes)
    if norm.centred:
        fused = call(aten.native_layer_norm.default, (norm.x, sizes, weight, bias, norm.eps), "layer_norm")
    else:
        fused = call(aten._fused_rms_norm.default, (norm.x, sizes, weight, norm.eps), "rms_norm")
    with program.graph.inserting_before(norm.result):
        result = program.graph.call_function(operator.getitem, (fused, 0))
    result.meta = {**norm.result.meta, "val": fused.meta["val"][0]}
    if not layout_is_unseen(program, norm.result, result.meta["val"]):
        erase_unused(program.graph, [result, *made])
        raise Refused("a norm by hand, but the fused operator would lay its result out otherwise")
    drop_metadata_checks(norm.nodes)
    replace_relaid(program, norm.result, result)
    left = set(program.graph.nodes)
    gone = tuple(node.name for node in norm.nodes if node not in left)
    kind = "LayerNorm" if norm.centred else "RMSNorm"
    return Change(f"{norm.result.name} spells out {kind}", gone, (fused.name,))


def _has_kernel(name: str, device: str) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device)
    return key is not None and has_kernel(name, key)
