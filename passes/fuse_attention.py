"""FuseAttention: attention written by hand becomes PyTorch's fused scaled-dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from memopt.errors import first_line
from memopt.graph.propagation import fake_mode
from memopt.graph.relayout import layout_is_unseen, replace_relaid
from memopt.graph.rewrite import Refused, drop_unused_constants, erase_unused, fake_value, forget_inplace
from memopt.pass_manager import Change, Pass, PassResult, attempt_each
from memopt.patterns.attention import Attention, Operand, attention_of
from memopt.patterns.attention_mask import Mask, Masks
from memopt.patterns.elements import drop_metadata_checks, keeps_order, permutation, shape
from memopt.program import Program
from memopt.torch_compat.fx_graphs import is_erased, make_fx

aten = torch.ops.aten
_FUSED = "aten._scaled_dot_product_"
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
# Below this many keys the CPU's kernel takes the largest score without vectors, and a row of NaN for a hidden one.
_CPU_VECTOR = 16


class FuseAttention(Pass):
    """Let one fused operator compute softmax(c·QKᵀ + M)·V, so that scores and probabilities are never stored.

    Algebra: FlashAttention (Dao et al., 2022): the softmax of a row is summed block by block, each block rescaled when
    a larger score is found. PyTorch's own `scaled_dot_product_attention` is traced on the operands' fake tensors, and
    the operators that it takes on that device, for these shapes and dtypes, are put in place.

    Cases:
        1. bmm, mm or baddbmm, softmax over the last dimension, bmm or mm, with any views, copies, casts to float32
           before the softmax and back after it, and scalings in between or on the operands.
        2. Tensors that are added to the scores, at any place: they become one additive mask M.
        3. Scores replaced by -inf or by a number far below any score (`where`, `masked_fill`): 0 or that number in M.
        4. M is known to be zero: there is no mask. M is known to be causal: no mask is stored or read.
        5. Keys and values repeated for groups of heads are read unrepeated where the fused operator can.

    A row that is hidden wholly is NaN by hand and 0 in the fused operator: where it cannot be excluded, M is made NaN
    in such rows. NaN stays NaN; an infinite query or key, NaN by hand, may give a number, as in PyTorch's attention.

    Refusals:
        - Scores or probabilities are read by something else (attention weights that are returned).
        - Dropout is active; or another operation (a cap on the scores, a head mask) lies in between.
        - A score is replaced by a number that does not hide it, or, by a number that is not low enough to swallow what
          is added to it, in a row that may be hidden wholly: the result by hand is then the mean of all values.
        - A mask broadcasts in a way that the operator's four dimensions cannot express, or is of another dtype.
        - PyTorch has no fused operator for the device, dtype and shapes; float64, which is the reference; on the CPU,
          fewer than 16 keys, where the kernel would hide a NaN.

    Training programs are returned unchanged.
    """

    name: ClassVar[str] = "fuse_attention"
    tolerance: ClassVar[float] = 4.0

    def run(self, program: Program) -> PassResult:
        """Return the program with each attention fused that can be."""
        if program.training:
            return PassResult(program)
        fuser = _Fuser(program.copy())

        def fuse(node: fx.Node) -> Change | None:
            found = attention_of(fuser.program, node) if node.target is aten._softmax.default else None
            return None if found is None else fuser.fuse(found)

        changes, refusals = attempt_each(fuser.program.calls, fuse)
        if not changes:
            return PassResult(program, (), tuple(refusals))
        new = fuser.finish()
        return PassResult(new.finish(baked=program.baked | fuser.baked), tuple(changes), tuple(refusals))


class _Fuser:
    """Rewrites one program, which it edits."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = program.graph
        self.baked: frozenset[str] = frozenset()
        self._made: list[fx.Node] = []
        self._masks = Masks(program, self._call, self._viewed)

    def finish(self) -> Program:
        """Clear away what was made or used in vain, and return the program."""
        erase_unused(self.graph, [node for node in self._made if not is_erased(node)])
        forget_inplace(self.graph)
        return drop_unused_constants(self.program)[0]

    def fuse(self, found: Attention) -> Change:
        """Rewrite one attention. Raises Refused before anything is replaced."""
        value = found.second.meta["val"]
        if value.dtype not in _DTYPES:
            raise Refused(f"{value.dtype} attention stays as it is written")
        queries, keys, width, wide = found.lengths
        if value.device.type == "cpu" and keys < _CPU_VECTOR:
            raise Refused(f"the CPU's fused operator hides NaN where there are only {keys} keys")
        mask = self._masks.of(found)
        query, by = self._operand(found, found.query, queries, width)
        key, more = self._operand(found, found.key, keys, width)
        values, _ = self._operand(found, [way for way in found.value if way.scale == 1], keys, wide)
        scale = mask.scale * by * more
        if not scale > 0 or not math.isfinite(scale):
            raise Refused(f"its scores are multiplied by {scale:g}, which is not positive and finite")
        grouped = self._grouped(found)
        module = None
        if grouped is not None:
            module = self._trace((query, *grouped), mask, scale, grouped=True)
        if module is not None and grouped is not None:
            key, values = grouped
        else:
            module = self._trace((query, key, values), mask, scale, grouped=False)
        if module is None:
            raise Refused("PyTorch has no fused operator for this device, dtype and shapes")
        operands = [query, key, values, *([mask.node] if mask.node is not None else [])]
        made, result = self._inline(module, operands, found.second)
        self.baked |= mask.read
        old = {node.name: node for node in (*found.nodes, *found.results[1:])}
        drop_metadata_checks(found.nodes)
        self._place(found, result)
        left = {node.name for node in self.graph.nodes}
        gone = tuple(name for name in old if name not in left)
        name = next(node.name for node in made if _is_fused(node))
        return Change(f"{found.softmax.name} and its two products are one {_short(made)}", gone, (name,))

    # -- operands --------------------------------------------------------------------------------------------------

    def _operand(self, found: Attention, ways: Sequence[Operand], rows: int, columns: int) -> tuple[fx.Node, float]:
        """The operand as batch x heads x rows x columns, read from as early as possible, and what to scale it with."""
        dtype = found.second.meta["val"].dtype
        for way in reversed(ways):
            if way.node.meta["val"].dtype == dtype:
                sizes = (*found.lead, columns, rows) if way.transposed else (*found.lead, rows, columns)
                node = self._viewed(way.node, sizes, found.second)
                if node is not None:
                    return (self._swapped(node, found.second) if way.transposed else node), way.scale
        raise Refused(f"{ways[0].node.name} is {ways[0].node.meta['val'].dtype}, the result {dtype}")

    def _viewed(self, node: fx.Node, sizes: tuple[int, ...], before: fx.Node) -> fx.Node | None:
        if shape(node) == sizes:
            return node
        try:
            fake_value(self.program, aten.view.default, (node, list(sizes)))
        except (RuntimeError, ValueError):
            return None
        return self._call(before, aten.view.default, (node, list(sizes)))

    def _swapped(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The node with its last two dimensions swapped, without permuting twice."""
        dims = permutation(node)
        if dims is None:
            return self._call(before, aten.transpose.int, (node, 2, 3))
        dims = [dims[0], dims[1], dims[3], dims[2]]
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        return source if dims == [0, 1, 2, 3] else self._call(before, aten.permute.default, (source, dims))

    def _grouped(self, found: Attention) -> tuple[fx.Node, fx.Node] | None:
        """Keys and values before they were repeated for groups of heads, if both were."""
        result = []
        for ways, columns in ((found.key, found.lengths[2]), (found.value, found.lengths[3])):
            last = ways[-1]
            sizes = shape(last.node)
            if last.node.target is not aten.expand.default or last.transposed or last.scale != 1 or len(sizes) != 5:
                return None
            source: fx.Node = last.node.args[0]  # type: ignore[assignment]
            batch, heads = found.lead
            few = sizes[1]
            if sizes != (batch, few, heads // few, found.lengths[1], columns) or len(shape(source)) != 5:
                return None
            if shape(source) != (batch, few, 1, *sizes[3:]) or last.node.meta["val"].dtype != found.dtype:
                return None
            while keeps_order(source) and shape(source) != (batch, few, *sizes[3:]):
                source = source.args[0]  # type: ignore[assignment]
            node = self._viewed(source, (batch, few, *sizes[3:]), found.second)
            if node is None:
                return None
            result.append(node)
        if shape(result[0])[1] != shape(result[1])[1]:
            return None
        return result[0], result[1]

    # -- the operator ----------------------------------------------------------------------------------------------

    def _trace(
        self, operands: tuple[fx.Node, ...], mask: Mask, scale: float, *, grouped: bool
    ) -> fx.GraphModule | None:
        """What PyTorch's attention does with these operands; None when it takes no fused operator."""
        nodes = [*operands, *([mask.node] if mask.node is not None else [])]

        def attention(*tensors: torch.Tensor) -> torch.Tensor:
            query, key, value = tensors[:3]
            added = tensors[3] if mask.node is not None else None
            return F.scaled_dot_product_attention(
                query, key, value, added, is_causal=mask.causal, scale=scale, enable_gqa=grouped
            )

        try:
            with fake_mode(self.program.graph_module), torch.no_grad():
                values = [node.meta["val"] for node in nodes]
                fakes = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
                module = make_fx(attention)(*fakes)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise Refused(f"PyTorch's attention refuses these operands: {first_line(error)}") from error
        return module if any(_is_fused(node) for node in module.graph.nodes) else None

    def _inline(
        self, module: fx.GraphModule, operands: list[fx.Node], before: fx.Node
    ) -> tuple[list[fx.Node], fx.Node]:
        """Put the traced operators before a node; return them and their result."""
        stands: dict[fx.Node, fx.Node] = {}
        remaining = iter(operands)
        made = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                stands[node] = next(remaining)
            elif node.op == "call_function" and (node.users or _is_fused(node)):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: stands[n])
                stands[node] = self._call(before, node.target, args, kwargs)
                made.append(stands[node])
        (result,) = module.graph.output_node().all_input_nodes
        return made, stands[result]

    def _call(self, before: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        name = "attention" if str(target).startswith(_FUSED) else None
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", target, args, kwargs or {}, name)
        node.meta = {**before.meta, "val": fake_value(self.program, target, args, kwargs)}
        self._made.append(node)
        return node

    # -- the result ------------------------------------------------------------------------------------------------

    def _place(self, found: Attention, result: fx.Node) -> None:
        """Let `result` stand for the second product, laid out so that all who read it see what they saw."""
        for node in reversed(found.results):
            try:
                value = fake_value(self.program, aten.view.default, (result, list(shape(node))))
            except (RuntimeError, ValueError):
                continue
            if layout_is_unseen(self.program, node, value):
                self._replace(node, result, found.second)
                return
        copy = self._call(found.second, aten.clone.default, (result,), {"memory_format": torch.contiguous_format})
        self._replace(found.results[-1], copy, found.second)

    def _replace(self, node: fx.Node, result: fx.Node, before: fx.Node) -> None:
        viewed = self._viewed(result, shape(node), before)
        assert viewed is not None, "the view was tried, and a contiguous tensor has every view"
        replace_relaid(self.program, node, viewed)


def _is_fused(node: fx.Node) -> bool:
    return str(node.target).startswith(_FUSED) and "math" not in str(node.target)


def _short(made: list[fx.Node]) -> str:
    return next(str(node.target).split(".")[1].lstrip("_") for node in made if _is_fused(node))
