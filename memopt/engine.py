"""What a backend is to the rest of memopt, and what holds of one that does not say otherwise."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from memopt.memory.timeline import Timeline, timeline
from memopt.program import Program
from memopt.step.sizes_apart import SizesError

if TYPE_CHECKING:
    from memopt.capture.dynamo import Hooks
    from memopt.cuda_graphs.pool import GraphPool
    from memopt.cuda_graphs.signature import StepSignature
    from memopt.cuda_graphs.step import CudaGraphStep
    from memopt.memory.buffers import BufferPlan
    from memopt.memory.cost.table import CostTable
    from memopt.step.stages import Fusion


def _never(signature: StepSignature, pool: GraphPool) -> CudaGraphStep | None:
    return None


@dataclasses.dataclass(frozen=True)
class Recalled:
    """What an engine has of a training graph that it lowered in an earlier process.

    Attributes:
        key: of graph, inputs and facts; empty where there is none.
        run: the function; None where it is not known.
        cuda_graph_step: makes of it a step that may be captured, by which it then runs; None where it cannot be.
    """

    key: str = ""
    run: Callable[..., Any] | None = None
    cuda_graph_step: Callable[[StepSignature, GraphPool], CudaGraphStep | None] = _never


@dataclasses.dataclass(frozen=True)
class ManySizes:
    """A graph that an engine lowered once for many sizes.

    Attributes:
        count_for: called with the graph's inputs before `run` is; raises SizesError where the budget is not kept.
        run: the function.
    """

    count_for: Callable[[Sequence[Any]], None]
    run: Callable[..., Any]


class Engine(abc.ABC):
    """Runs rewritten programs.

    Attributes:
        name: what users call it.
        exact: whether what runs is the program itself, operator by operator, so that its timeline is the peak.
        measures: whether inference is held to what a run takes, not to the program's timeline.
        lays_out: whether weights of convolutions are laid out anew as its kernels want them.
        strided: whether training runs PyTorch's own convolutions, on operands that lie as the program says.
        fuses: whether a batch norm goes into the kernel after its convolution, weights left as they are.
        many_sizes: whether it makes code for many sizes.
        rehearses: whether it makes the code of graphs that are only collected, where the session is rehearsing, and
            leaves to operators what is lowered while the session is exact.
        recurrent: whether it runs a recurrent layer as one operator; else Dynamo leaves such layers to eager.
        frees_outputs: whether memory of forward's outputs is free as soon as the caller lets go of them.
    """

    name: str
    exact: bool
    measures = False
    lays_out = False
    strided = False
    fuses = False
    many_sizes = False
    rehearses = False
    recurrent = True
    frees_outputs = False

    @abc.abstractmethod
    def compile_captured(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks
    ) -> Callable[..., Any]:
        """Lower one Dynamo graph with the hooks into memopt; return the callable that Dynamo installs."""

    def compile_symbolic(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> ManySizes:
        """Lower one Dynamo graph whose sizes are symbols, for all sizes.

        Raises:
            SizesError: each size is to be planned by itself.
        """
        raise SizesError(f"backend {self.name!r} makes no code for many sizes")

    def recall(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks, facts: bytes
    ) -> Recalled:
        """What an earlier process made of a training graph and kept, without tracing it; see `Hooks.repeatable`.

        Args:
            graph_module: Dynamo's graph.
            example_inputs: its inputs.
            hooks: of the graph.
            facts: what the engine's code depends on beside graph and inputs.
        """
        return Recalled()

    def fusion(self, table: CostTable) -> Fusion | None:
        """What its kernels fuse away, by the device's speed in the table; None where every value is stored."""
        return None

    def timeline(self, program: Program, workspace: Mapping[str, int] | None = None) -> Timeline:
        """The memory of an inference program as it lays it out, with the workspace of nodes, in bytes by name."""
        return timeline(program, workspace)

    def buffer_plan(self, program: Program) -> BufferPlan | None:
        """Where the values of an inference program live in one block; None where there is no such block."""
        return None
