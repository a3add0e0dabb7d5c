"""Inductor's training pipeline with memopt's partition of the joint graph in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memopt.capture.dynamo import Hooks
from memopt.capture.joint import Partitioned
from memopt.graph.rewrite import storages
from memopt.inductor.edits import edits
from memopt.inductor.fusion import realize
from memopt.inductor.joint_cache import JointCache
from memopt.inductor.offload import wait_on_host
from memopt.inductor.order import KeepOrder
from memopt.inductor.own_memory import note_memory
from memopt.inductor.own_reads import note_reads
from memopt.inductor.padding import product_settings
from memopt.inductor.peak_estimate import expected_bytes
from memopt.inductor.postplan_reorder import together
from memopt.inductor.product_sums import register_product_sums
from memopt.inductor.strided_views import copy_bases
from memopt.inductor.trace import Trace
from memopt.inductor.write_over import register_write_over
from memopt.program import Program, copy_node, module_of
from memopt.torch_compat.aot_autograd import aot_settings
from memopt.torch_compat.donated import may_donate
from memopt.torch_compat.inductor_compile import CustomPartitionerFn, compile_graph
from memopt.torch_compat.inductor_fusion import fused_by
from memopt.torch_compat.inductor_settings import inductor_settings
from memopt.torch_compat.log_suppression import unread_logs_suppressed

# What tells code that is fused in the plan's order, or in a rewrite's, from other code of the same graph.
IN_ORDER, ADDED_IN_ORDER, IN_ANY_ORDER = b"memopt, in either order", b"memopt, rewrites in either order", b"memopt"

# A buffer that waits for another of its size is alive meanwhile; the allocator reuses memory as well.
_FREED_AT_ONCE = {"allow_buffer_reuse": False}
# The order that frees most at once computes gradients of weights last; theirs are wanted as soon as they can be there.
_GRADIENTS_EARLY = {"reorder_for_peak_memory": False}
# The order is chosen anew by a count of bytes that knows of no sum that takes the memory of its operand.
_AS_PLANNED = {**_FREED_AT_ONCE, "reorder_for_peak_memory": False}


class Partition(CustomPartitionerFn):
    """Inductor's hook for the joint graph, after its own joint-graph passes.

    Attributes:
        token: which fusion policy its code is made with.
        donated: the arguments that code may write over, once backward is lowered; a graph does not tell them.
    """

    def __init__(self, partition: Callable[..., Any]) -> None:
        self._partition, self.token = partition, IN_ANY_ORDER
        self.donated: tuple[int, ...] | None = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Partitioned:
        """Cut the joint graph."""
        kwargs.pop("compiler", None)
        graphs: Partitioned = self._partition(gm, joint_inputs, **kwargs)
        return graphs

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        return self  # Inductor copies its settings for the keys of its cache

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_of_a_plan, ()  # and pickles them, with all that they hold

    def uuid(self) -> Any | None:
        """What stands for the hook in the keys of Inductor's cache.

        These go by both graphs that come of the plan: beside them only the fusion policy matters, and what backward's
        code may write over.
        """
        return self.token if self.donated is None else b"%b, donated %b" % (self.token, repr(self.donated).encode())


def keep_order(policy: contextlib.ExitStack, partition: Partition, *, added_only: bool = False) -> None:
    """Until the policy is left, code is fused in the order of the graph, or in that of what rewrites have added."""
    partition.token = ADDED_IN_ORDER if added_only else IN_ORDER
    policy.enter_context(fused_by(KeepOrder(added_only=added_only)))
    policy.enter_context(inductor_settings(_AS_PLANNED))


def free_at_once(policy: contextlib.ExitStack) -> None:
    """Until the policy is left, code lets go of each buffer where it is read last, and keeps none for the next."""
    policy.enter_context(inductor_settings(_FREED_AT_ONCE))


def gradients_early(policy: contextlib.ExitStack) -> None:
    """Until the policy is left, code computes each gradient where backward comes to it."""
    policy.enter_context(inductor_settings(_GRADIENTS_EARLY))


def planned_cut(hooks: Hooks, joint: fx.GraphModule, num_fwd_outputs: int, **options: Any) -> Any:
    """Both graphs by the plan; what it counts on as stored is."""
    return cut_as_planned(hooks, hooks.rewrite(joint, num_fwd_outputs), num_fwd_outputs, **options)


def cut_as_planned(hooks: Hooks, program: Program, num_fwd_outputs: int, **options: Any) -> Any:
    """Both graphs of a planned program; what the plan counts on as stored is.

    Kernels that read the same values stand together, where that is expected to take no more memory, and some of what
    is saved waits on the host.
    """
    forward, backward = hooks.cut(program, num_fwd_outputs, **options)
    order = together(program)
    if order is not None:
        moved = in_order(backward, [node.name for node in order])
        if expected_bytes(forward, moved, num_fwd_outputs) <= expected_bytes(forward, backward, num_fwd_outputs):
            backward = moved
    forward, backward = wait_on_host(hooks.session, forward, backward, num_fwd_outputs)  # type: ignore[arg-type]
    realize(forward)
    realize(backward)
    return forward, backward


def in_order(module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """A copy of a graph with its operations in the order of these names; what is not among them comes first, as it is.

    It is what a program would be cut into whose operations of that phase are in that order.
    """
    place = {name: index for index, name in enumerate(names)}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    given = [node for node in module.graph.nodes if node.op != "output"]
    for node in sorted(given, key=lambda node: place.get(node.name, -1) if node.op == "call_function" else -1):
        copies[node] = copy_node(graph, node, copies.__getitem__)
    copy_node(graph, module.graph.output_node(), copies.__getitem__)
    return module_of(module, graph)


def _nothing_of_a_plan() -> None:
    """What a pickled partition becomes: keys of caches need no more."""


class NoBackward(Exception):
    """Raised where a graph is no step: its inputs need gradients, what it returns are their views, or needs none."""


def compile_training(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner: Callable[..., Any],
    partition: Partition,
    trace: Trace | None = None,
    cached: contextlib.AbstractContextManager[None] | None = None,
) -> Any:
    """Lower one Dynamo graph with `inner` as the compiler of forward and backward graph, cut apart by the partition.

    A graph that is lowered several times is traced once, where each time is given the same `trace`. What torch's cache
    of joint graphs is to do meanwhile, `cached` says; else it is not used.

    Raises:
        NoBackward: AOTAutograd takes the graph for inference.
    """

    def graph_compiler(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if options.get("is_inference"):
            raise NoBackward
        return inner(module, inputs, **options)

    register_product_sums()
    register_write_over()
    # Both graphs are lowered at once, since a peak is that of both.
    settings = aot_settings(force_non_lazy_backward_lowering=True)
    with settings, may_donate(), unread_logs_suppressed(), cached or JointCache().attempt(), (trace or Trace()).kept():
        return compile_graph(
            fx.GraphModule(graph_module, graph_module.graph),
            example_inputs,
            graph_compiler,
            # Parts of a graph are for Inductor's own CUDA graphs, which are not used: finding them takes time.
            {
                "custom_partitioner_fn": partition,
                "graph_partition": False,
                **edits(_edit_first),
                **product_settings(graph_module, example_inputs),
            },
        )


def _edit_first(graph: fx.Graph) -> None:
    note_memory(graph)
    copy_bases(graph)
    note_reads(graph)


def saved_bytes(forward: fx.GraphModule, outputs: int) -> int:
    """Bytes that a forward graph leaves behind for backward, by storage, what was there before left out."""
    graph: Any = forward.graph
    values = [node for node in graph.output_node().args[0][outputs:] if isinstance(node, fx.Node)]
    before = {key for node in graph.find_nodes(op="placeholder") for key in storages(node)}
    left = {key: size for node in values for key, size in storages(node).items()}
    return sum(size for key, size in left.items() if key not in before)
