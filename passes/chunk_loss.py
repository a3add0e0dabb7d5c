"""ChunkLoss: a linear layer and the cross-entropy after it, computed in chunks of rows."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import fx

from memopt.graph.propagation import propagate
from memopt.graph.rewrite import Refused
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.patterns.column_padding import Aligned, turn_after_padding
from memopt.patterns.grad_in_forward import grad_in_forward
from memopt.patterns.kept_padding import keep_padding
from memopt.patterns.product_sums import in_float32
from memopt.patterns.row_chunks import run_in_chunks
from memopt.patterns.rows import HALVES, PRODUCTS, RowRefused, RowRegion, find_rows, products_before_losses
from memopt.program import Phase, Program
from memopt.torch_compat.fx_graphs import is_erased

_LEAST_CHUNKS, _MOST_CHUNKS = 4, 16
_ALIGNED_BYTES = 16  # rows of matrices begin at multiples of this where tensor cores are to read them
_LARGER, _WAITING = 2, 4
# Chunks of so many times fewer rows, and at most so many of them, where a step has no room for more.
_SMALLER, _MOST_SMALLER = 4, 32
_ALIGNED = 64  # rows of a chunk are a multiple of this where there are more


class ChunkLoss(Pass):
    """Compute the logits of some rows (tokens) at a time, their losses, and in backward their gradients.

    Algebra: with logits L = XW + b, the loss of a row reads that row of L only, and so does the row of the gradient dL.
    So for chunks X_k of the rows of X: the losses are those of X_k·W + b, put together; dX is the dL_k·Wᵀ, put
    together; dW = Σ X_kᵀ·dL_k and db = Σ 1ᵀ·dL_k. Neither the logits nor their gradients ever exist for all rows: of
    each tensor of tokens by vocabulary one chunk is left. Where the gradients are proportional to that of the loss
    itself, one number, they are computed with one in its place while the chunk of logits is there, in forward, and
    multiplied in backward; else backward computes L_k once more, at the price of one more matrix product. The idea is
    known (Liger Kernel, arXiv 2410.10989); here it is a rewrite of the joint graph.

    On CUDA columns are padded so that rows begin at multiples of 16 bytes: the weight once, and what is of a chunk
    only by the kernels that write it anyway. Products of matrices that are not so aligned are much slower. The values
    in between keep those columns (`keep_padding`): one kernel makes a chunk's losses and gradients of its logits. It is
    the same one for all chunks, since each has copies of what it reads one number of for each row, its labels say.

    Cases: everything from the product on that works row by row, in either graph of the step, whatever it is made of:
        1. `_log_softmax` and `nll_loss` with mean, sum or no reduction, class weights and an index to ignore.
        2. The same spelled out (amax, exp, sum, log, gather), as Inductor decomposes it.
        3. Element-wise operations on the logits (a cast to float32, a bias, soft capping), label smoothing, z-loss.
        4. The weight may be tied or transposed; views such as [batch, sequence, vocabulary] may stand in between.
        5. The weight's columns may be padded for the sake of a faster product, and the logits' cut off again.
        6. Classes in tiles: the loss of further ones may read what those before have come to (TRL's fused heads).
        7. The caller may be returned the logits, or what is computed from them, beside the loss: these stay whole,
           chunks read their rows, and the gradients that come back of them are added by rows.

    Numbers: sums over rows of half precision are added up in float32 and rounded once; a GPU's library of matrix
    products adds them to the sum where it stands. dW and db are sums in another
    order than before, hence the tolerance.

    Refusals:
        - Another tensor as large as the logits flows in.
        - Something that reads them does not work row by row, or is not known to.
        - Chunks would not save memory: the weight is as large as the logits.

    Programs without a backward are returned unchanged, and products that feed no loss over classes are left alone.
    """

    name: ClassVar[str] = "chunk_loss"
    tolerance: ClassVar[float] = 2.0
    lowers_floor: ClassVar[bool] = True

    def __init__(
        self,
        chunks: int | None = None,
        multiple: int | None = None,
        *,
        larger: int = 1,
        waiting: int = 1,
        smaller: int = 1,
    ) -> None:
        """Set the number of chunks.

        Args:
            chunks: how many; None: so many that a chunk of logits is about twice as large as the weight, at least 4 and
                at most 16.
            larger: where `chunks` is None, how many times as many rows a chunk has. Fewer products and sums take less
                time: products of few rows leave part of a GPU idle. Where so large chunks would not save memory, as
                many rows.
            waiting: at most so many chunks' shares in the weight's gradient wait to be added up at once, and two or as
                many as take no more memory than a chunk of logits. Each time the sum so far is read and written in
                float32, twice as wide as a share: of all that chunks add this takes the most time. Where the product
                itself adds in float32 (`product_sums.in_float32`), there are no shares.
            smaller: where `chunks` is None, how many times fewer rows a chunk has, in at most 32 chunks: each takes
                less memory, and all of them more time.
            multiple: columns of logits are padded to a multiple of this; None: on CUDA to 16 bytes, else not at all.

        Raises:
            ValueError: fewer than two chunks, chunks less than once as large, or less than one share at once.
        """
        if chunks is not None and chunks < 2:
            raise ValueError(f"chunks is {chunks}: at least 2 are needed")
        if min(larger, waiting, smaller) < 1:
            sizes = f"chunks {larger} times as large, {smaller} times as small, {waiting} shares at once"
            raise ValueError(f"{sizes}: at least one is needed")
        self.chunks, self.multiple, self.larger, self.waiting = chunks, multiple, larger, waiting
        self.smaller = smaller

    @property
    def key(self) -> str:
        """The name, and how many times as large or as small chunks are."""
        larger = f"*{self.larger}" if self.larger > 1 else ""
        return self.name + larger + (f"/{self.smaller}" if self.smaller > 1 else "")

    @property
    def others(self) -> tuple[Pass, ...]:
        """Chunks of twice as many rows, and sums of several, where the number of chunks is not given."""
        if self.chunks is not None or self.larger > 1 or self.smaller > 1:
            return ()
        return (ChunkLoss(multiple=self.multiple, larger=_LARGER, waiting=_WAITING),)

    @property
    def deeper(self) -> Pass | None:
        """Chunks of fewer rows, where the number of chunks is not given."""
        return (
            None if self.chunks is not None or self.smaller > 1 else ChunkLoss(multiple=self.multiple, smaller=_SMALLER)
        )

    def run(self, program: Program) -> PassResult:
        """Return the program with each loss chunked that can be; one change per loss."""
        if not program.training:
            return PassResult(program)
        new = program.copy()
        turn_after_padding(new)
        changes: list[Change] = []
        refusals: list[Refusal] = []
        for node in products_before_losses(new):
            if is_erased(node):
                continue
            if changes:  # what the latest rewrite has made may be read by this loss, as by one of further classes
                propagate(new.graph_module)
            try:
                chunk = self._rows_per_chunk(node)
                region = self._aligned(new, find_rows(new, node))
                kept = region.product in region.wide and keep_padding(new, region)
                region = find_rows(new, region.product) if kept else region
            except RowRefused as reason:
                refusals.append(Refusal(reason.node.name, str(reason)))
            except Refused as reason:
                refusals.append(Refusal(node.name, str(reason)))
            else:
                changes.append(self._change(new, region, chunk))
        return PassResult.of(program, new, changes, refusals)

    def _aligned(self, program: Program, region: RowRegion) -> RowRegion:
        """The region with matrix products whose operands and results have aligned rows."""
        value = region.product.meta["val"]
        multiple = self.multiple or (_ALIGNED_BYTES // value.element_size() if value.is_cuda else 1)
        if multiple == 1:
            return region
        aligned = Aligned(program, multiple)
        product = region.product  # the caller gets rows that lie as they do without the pass
        if product in region.wide:
            product = aligned.product(product)
        for node in region.nodes[Phase.BACKWARD]:
            if node.target in PRODUCTS:
                (aligned.turned if region.recipes[node].summed else aligned.inner)(node)
        return find_rows(program, product)

    def _rows_per_chunk(self, product: fx.Node) -> int:
        """Raises Refused where chunks would take more memory than they save."""
        rows, width = int(product.meta["val"].shape[0]), _width(product)
        if rows < 2:
            raise Refused("it has one row")
        if self.chunks is not None:
            return math.ceil(rows / self.chunks)
        chunks = min(_MOST_CHUNKS, max(_LEAST_CHUNKS, math.ceil(rows / (2 * width))))
        if self.smaller > 1:
            chunks = max(chunks, min(_MOST_SMALLER, chunks * self.smaller))
        for larger in range(self.larger, 0, -1):
            chunk = math.ceil(rows / chunks) * larger
            if chunk > _ALIGNED:
                chunk = math.ceil(chunk / _ALIGNED) * _ALIGNED
            saved, added = self._saved_and_added(product, chunk)
            if saved > added:
                return chunk
        raise Refused(f"chunks of its {rows} rows would save {saved} bytes and take {added}")

    def _saved_and_added(self, product: fx.Node, chunk: int) -> tuple[int, int]:
        """Bytes that chunks of so many rows save and take.

        Without chunks at least two tensors as large as the logits are alive at once; with them two chunks of these, the
        sum of the weight's gradient beside what is added to it, and the rows of the input's gradient twice.
        """
        logits, width = product.meta["val"], _width(product)
        rows, columns = (int(length) for length in logits.shape)
        size = int(logits.element_size())
        shares = 0 if in_float32(logits) else min(self._shares(product, chunk), math.ceil(rows / chunk))
        added = (4 + 2 * shares if logits.dtype in HALVES else size) * columns * width + size * rows * width
        return 2 * size * columns * (rows - chunk), added

    def _shares(self, product: fx.Node, chunk: int) -> int:
        """How many chunks' shares in the weight's gradient are added up at once."""
        return min(self.waiting, max(2, chunk // _width(product)))

    def _change(self, program: Program, region: RowRegion, chunk: int) -> Change:
        before = tuple(node.name for phase in Phase for node in region.nodes[phase])
        count, shares = math.ceil(region.rows / chunk), self._shares(region.product, chunk)
        summary = f"{region.product.name} and its loss in {count} chunks of {chunk} rows"
        return Change(summary, before, tuple(run_in_chunks(region, chunk, grad_in_forward(program, region), shares)))


def _width(product: fx.Node) -> int:
    """Columns of the product's left operand."""
    return int(product.args[-2].meta["val"].shape[1])  # type: ignore[union-attr]
