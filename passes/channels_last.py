"""ChannelsLast: run a training step's convolutions on images laid out channels last, where that is faster."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import fx

from memopt.graph import fake_calls
from memopt.graph.fake_calls import CHANNELS_LAST
from memopt.graph.propagation import fake_mode
from memopt.graph.rewrite import Refused, erase_unused, forget_inplace
from memopt.memory.cost.roofline import is_light
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.program import Program, is_any_view, is_effectful, is_random
from memopt.torch_compat.inductor_prims import prims

aten = torch.ops.aten

# Which operands of a convolution are laid out anew.
_OPERANDS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}

# Operators whose kernels take operands of any strides as they are, beside views and what works element by element.
_FOLLOWING = frozenset((
    aten.cat, aten.constant_pad_nd, aten.clone, aten.slice_backward, aten.select_backward, aten.copy,
    aten.sum, aten.mean, aten.var, aten.var_mean, aten.amax, aten.amin,
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm,
    aten.hardswish, aten.elu_backward, aten.leaky_relu_backward, aten.softplus_backward, aten.mish_backward,
    aten._prelu_kernel, aten._prelu_kernel_backward, aten.masked_fill, aten.full_like, aten.zeros_like, aten.ones_like,
    aten.empty_like,
    aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training, aten._batch_norm_with_update, aten._batch_norm_with_update_functional,
    aten.cudnn_batch_norm, aten.native_batch_norm_backward, aten.cudnn_batch_norm_backward, aten.batch_norm_backward,
    aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten.avg_pool2d, aten.avg_pool2d_backward,
    aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward,
    aten.upsample_nearest2d, aten.upsample_nearest2d_backward,
    aten.upsample_bilinear2d, aten.upsample_bilinear2d_backward,
    prims.convert_element_type, prims._low_memory_max_pool_with_offsets, prims._low_memory_max_pool_offsets_to_indices,
))  # fmt: skip
# Of these all images must lie alike, of whatever size: else kernels copy them, or lay out what they make as it was.
_ALIKE = frozenset(
    packet for packet in _FOLLOWING if packet is aten.cat or "pool2d" in str(packet) or "upsample" in str(packet)
)


class Judge(Protocol):
    """Decides between two layouts of one program."""

    def __call__(self, before: Program, after: Program) -> str | None:
        """Return None where the program is to be laid out as `after`, or else why not, in one line."""

    def may_gain(self, program: Program) -> bool:
        """Whether anything needs to be compared: whether there are devices and dtypes for which layouts matter."""


class ChannelsLast(Pass):
    """Lay the images around two- and three-dimensional convolutions out channels last, in both graphs of a step.

    Algebra: a layout is where values lie, not what they are: f(copy(x)) = f(x). cuDNN's kernels for half precision (and
    TF32) compute channels last; given anything else they convert operands and results at every call, which takes time
    and memory beside the tensors. Copies in the graph itself do so once, and everything between convolutions follows.

    Cases:
        1. Images and weights of convolutions, transposed ones too, and in backward gradients, are read through a copy
           that is laid out channels last, one for all that read it; none where they lie so already.
        2. What is computed element by element, batch norms, pools, upsampling, concatenations, paddings, sums over
           images and matrix products follow: their results come out as their operands lie. Where some operands of one
           image's size lie otherwise, these are copied, too.
        3. What asks for a layout gets the old one, through a copy back: views that exist only of it, operators not
           named here, random draws (which follow the order in memory), and all that the caller gets: outputs, new
           values of inputs, gradients in the layout of their parameters.

    Parameters and the optimizer's state stay as they lie. Whether it pays is decided for the whole program, by the
    costs of all operators that change, the copies included.

    Numbers: other kernels for the same sums: hence the tolerance.

    Refusals: the judge's reason, for the first convolution; views and operators of case 3, by name. Inference programs
    are returned as they are (`memopt.compilation.layout` lays out their weights).
    """

    name: ClassVar[str] = "channels_last"
    tolerance: ClassVar[float] = 4.0

    def __init__(self, judge: Judge | None = None, *, always: bool = False) -> None:
        """Set how it is decided.

        Args:
            judge: what decides. None: in a compilation the costs of operators on its device; by itself nothing changes.
            always: rewrite whatever it may cost.
        """
        self.judge, self.always = judge, always

    def judged_by(self, judge: Judge) -> ChannelsLast:
        """The pass with this judge, unless it has one."""
        return self if self.judge is not None else ChannelsLast(judge, always=self.always)

    def run(self, program: Program) -> PassResult:
        """Return the program laid out channels last, one change per convolution; or the program itself and why."""
        heavy = [node for node in program.calls if node.target in _OPERANDS and _image_of(node).dim() in CHANNELS_LAST]
        if not program.training or not heavy:
            return PassResult(program)
        if not self.always and (self.judge is None or not self.judge.may_gain(program)):
            return PassResult(program)
        new = program.copy()
        work = _Relayout(new)
        try:
            work.run()
        except Refused as reason:
            return PassResult(program, (), (Refusal(heavy[0].name, str(reason)),))
        if not work.changes:
            return PassResult(program)
        forget_inplace(new.graph)
        new = new.finish()
        against = None if self.always or self.judge is None else self.judge(program, new)
        if against is not None:
            return PassResult(program, (), (Refusal(heavy[0].name, against),))
        return PassResult(new, tuple(work.changes), tuple(work.refusals))


class _Relayout:
    """One walk over a graph that is being edited, first node to last, with the values as they lie now."""

    def __init__(self, program: Program) -> None:
        self.graph, self.outputs = program.graph, program.output_nodes
        self.mode = fake_mode(program.graph_module)
        self.now: dict[fx.Node, Any] = {}
        self.lasts: dict[fx.Node, fx.Node] = {}
        self.olds: dict[fx.Node, fx.Node] = {}
        self.changes: list[Change] = []
        self.refusals: list[Refusal] = []
        self.made: list[str] = []  # copies for the node at hand

    def run(self) -> None:
        cached = self.mode.cache_enabled
        self.mode.cache_enabled = False  # a convolution's layout depends on settings that the cache does not know
        try:
            with self.mode, torch.no_grad():
                for node in list(self.graph.nodes):
                    if node.op != "output":
                        self.made = []
                        self._visit(node)
                self._give_back()
            erase_unused(self.graph, [*self.lasts.values(), *self.olds.values()])
        finally:
            self.mode.cache_enabled = cached

    def _visit(self, node: fx.Node) -> None:
        self.now[node] = node.meta["val"]
        if node.op != "call_function":
            return
        if node.target in _OPERANDS and _image_of(node).dim() in CHANNELS_LAST:
            self._convolution(node)
        elif any(self._moved(operand) for operand in node.all_input_nodes):
            if _follows(node) and self._run(node, self._alike(node)):
                return
            if not self._run(node, lambda operand: self._old(operand, node)):
                raise Refused(f"{node.name} cannot be run on operands that are laid out as they were")
            if self.made:
                self.refusals.append(Refusal(node.name, "asks for the layout that its operands had: copied back"))

    def _convolution(self, node: fx.Node) -> None:
        images = {node.args[index] for index in _OPERANDS[node.target]}  # type: ignore[index]

        def last(operand: fx.Node) -> fx.Node:
            return self._last(operand, node) if operand in images else operand

        before = node.args
        if self._run(node, last):
            result = self.now[node][0] if isinstance(self.now[node], (tuple, list)) else self.now[node]
            if result is None or _is_last(result):
                if self.made or any(self._moved(operand) for operand in node.all_input_nodes):
                    self.changes.append(Change("channels last", (node.name,), (*self.made, node.name)))
                return
        node.args, self.now[node] = before, node.meta["val"]  # no kernel for it: it takes what there is
        if not self._run(node, lambda operand: self._old(operand, node)):
            raise Refused(f"{node.name} cannot be run on operands that are laid out as they were")

    def _alike(self, node: fx.Node) -> Callable[[fx.Node], fx.Node]:
        """Operands of an element-wise operator in one layout, the moved one's."""
        sizes = {self.now[item].numel() for item in node.all_input_nodes if self._moved(item) and self._is_strict(item)}
        every = getattr(node.target, "overloadpacket", None) in _ALIKE

        def choose(operand: fx.Node) -> fx.Node:
            value = self.now[operand]
            plain = isinstance(value, torch.Tensor) and value.dim() in CHANNELS_LAST and value.is_contiguous()
            if sizes and plain and not _is_last(value) and (every or value.numel() in sizes):
                return self._last(operand, node)
            return operand

        return choose

    def _run(self, node: fx.Node, choose: Callable[[fx.Node], fx.Node]) -> bool:
        """Let the node read what is chosen for its operands; False, and nothing changed, where it cannot."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), choose)
        values, named = fx.map_arg((args, kwargs), lambda operand: self.now[operand])
        try:
            self.now[node] = fake_calls.run(node.target, values, named)
        except (RuntimeError, ValueError):
            return False
        node.args, node.kwargs = args, kwargs
        return True

    # -- copies --------------------------------------------------------------------------------------------------

    def _last(self, operand: fx.Node, reader: fx.Node) -> fx.Node:
        """The operand channels last: itself, or a copy that is made for the first that reads it."""
        value = self.now[operand]
        if not isinstance(value, torch.Tensor) or value.dim() not in CHANNELS_LAST or _is_last(value):
            return operand
        if operand not in self.lasts:
            with self.graph.inserting_before(reader):
                self.lasts[operand] = self._copy(operand, CHANNELS_LAST[value.dim()], reader)
        return self.lasts[operand]

    def _old(self, operand: fx.Node, reader: fx.Node) -> fx.Node:
        """The operand as it lay: itself, or a copy that is made for the first that reads it."""
        if not self._moved(operand):
            return operand
        if operand not in self.olds:
            with self.graph.inserting_before(reader):
                self.olds[operand] = self._back(operand, reader)
        return self.olds[operand]

    def _back(self, operand: fx.Node, reader: fx.Node) -> fx.Node:
        wanted = operand.meta["val"]
        if not isinstance(wanted, torch.Tensor):
            raise Refused(f"{operand.name} is several tensors, and what reads it asks for their layout")
        for form in (torch.contiguous_format, CHANNELS_LAST.get(wanted.dim())):
            if form is not None and wanted.is_contiguous(memory_format=form):
                return self._copy(operand, form, reader)
        steps = wanted.stride()
        order = sorted(range(wanted.dim()), key=lambda dim: (-steps[dim], dim))
        if wanted.permute(order).is_contiguous():
            turned = self._call(aten.permute.default, (operand, order), {}, reader)
            flat = self._copy(turned, torch.contiguous_format, reader)
            return self._call(aten.permute.default, (flat, [order.index(dim) for dim in range(len(order))]), {}, reader)
        if is_any_view(operand):  # of gaps or repetitions: the same view of what it shows
            source = operand.all_input_nodes[0]
            return self._call(operand.target, (self._old(source, reader), *operand.args[1:]), operand.kwargs, reader)
        raise Refused(f"{operand.name} is laid out in a way that no copy gives")

    def _copy(self, operand: fx.Node, form: torch.memory_format, reader: fx.Node) -> fx.Node:
        return self._call(aten.clone.default, (operand,), {"memory_format": form}, reader)

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: Any, reader: fx.Node) -> fx.Node:
        made = self.graph.call_function(target, args, dict(kwargs))
        made.meta = {key: reader.meta[key] for key in ("phase", "stack_trace", "partitioner_tag") if key in reader.meta}
        values, named = fx.map_arg((args, dict(kwargs)), lambda operand: self.now[operand])
        self.now[made] = made.meta["val"] = target(*values, **named)
        self.made.append(made.name)
        return made

    # -- what the caller gets ------------------------------------------------------------------------------------

    def _give_back(self) -> None:
        """Give the caller every output as it lay, copied where it is made, so that it need not be held twice."""
        results = list(self.outputs)
        for index, value in enumerate(results):
            if isinstance(value, fx.Node) and self.now[value].stride() != value.meta["val"].stride():
                results[index] = self._returned(value)
        self.graph.output_node().args = (tuple(results),)

    def _returned(self, value: fx.Node) -> fx.Node:
        wanted, copy = value.meta["val"], value
        with self.graph.inserting_before(value.next):
            if self._moved(value):
                copy = self._back(value, value)
            if self.now[copy].stride() == wanted.stride():
                return copy
            if not wanted.is_contiguous():
                return copy
            # Strides of dimensions with one element alone differ: optimizers compare these, too.
            flat = self._call(aten.view.default, (copy, [wanted.numel()]), {}, value)
            return self._call(aten.view.default, (flat, list(wanted.shape)), {}, value)

    # -- questions -----------------------------------------------------------------------------------------------

    def _moved(self, node: fx.Node) -> bool:
        """Whether the node's tensors lie otherwise than they did."""
        now, was = self.now[node], node.meta["val"]
        if isinstance(now, torch.Tensor):
            return isinstance(was, torch.Tensor) and _strides(now) != _strides(was)
        if isinstance(now, (tuple, list)):
            pairs = zip(now, was, strict=True)
            return any(isinstance(a, torch.Tensor) and _strides(a) != _strides(b) for a, b in pairs)
        return False

    def _is_strict(self, node: fx.Node) -> bool:
        value = self.now[node]
        if not isinstance(value, torch.Tensor) or value.dim() not in CHANNELS_LAST:
            return False
        return _is_last(value) and not value.is_contiguous()


def _follows(node: fx.Node) -> bool:
    """Whether the operator may be given operands of other strides."""
    if node.target is operator.getitem:
        return True
    if is_effectful(node) or is_random(node) or node.target is aten.as_strided.default:
        return False
    return is_light(node) or is_any_view(node) or getattr(node.target, "overloadpacket", None) in _FOLLOWING


def _image_of(node: fx.Node) -> torch.Tensor:
    """The image that a convolution reads, in either direction."""
    operand: Any = node.args[0]
    value: torch.Tensor = operand.meta["val"]
    return value


def _is_last(value: torch.Tensor) -> bool:
    return value.is_contiguous(memory_format=CHANNELS_LAST[value.dim()])


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter: those of dimensions with more than one element."""
    if value.layout is not torch.strided or value.numel() < 2:
        return ()
    return tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)
