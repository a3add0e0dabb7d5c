"""What a monitor has seen, as plain frozen records; sizes are bytes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """One step of the loop.

    Attributes:
        number: 0 for the first.
        held_before: bytes of tensors on the device as the step began.
        peak: the most bytes at once within it.
        held_after: bytes as it ended.
        seconds: wall time from the end of the step before; the device's work is not waited for.
        reserved: CUDA only: the most bytes that the caching allocator held from the driver within it. None on CPU.
        lost: CUDA only: reserved beyond the peak: gaps between blocks, and blocks cached from earlier. None on CPU.
    """

    number: int
    held_before: int
    peak: int
    held_after: int
    seconds: float
    reserved: int | None = None
    lost: int | None = None


@dataclasses.dataclass(frozen=True)
class ModuleMemory:
    """One module of the user's, what lies in it included.

    Attributes:
        name: as in the model, `layers.3.mlp`; of the model itself its class.
        kind: its class.
        held: the most bytes of what its forward made that were there still when a backward began.
        peak: the most bytes at once in one of its calls, beyond those that were there as it began; calls in a row, with
            no operator between them, are one.
    """

    name: str
    kind: str
    held: int
    peak: int


@dataclasses.dataclass(frozen=True)
class TensorGroup:
    """Tensors that are alike; each storage counts once.

    Attributes:
        count: how many.
        bytes: of all of them.
        shape: as made, not as viewed later.
        dtype: `float32` and the like.
        phase: "parameter", "buffer", "gradient", "optimizer state"; else where it was made: "forward", "backward",
            "optimizer", "loop" (outside of modules), "before" the monitor, or "unseen" (by compiled code, say).
        module: the name of the module that made or has it; with * for numbers where several do so alike.
        line: the user's line that made it as `file:line, code`; empty where it is not known.
        operator: which made it; empty where it is not known.
    """

    count: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    phase: str
    module: str
    line: str
    operator: str


@dataclasses.dataclass(frozen=True)
class Leak:
    """Tensors of which more are there after each step.

    Attributes:
        tensors: those that are there.
        steps: in how many steps they were made.
        in_graph: whether only autograd's graph holds them: something that needs a gradient is kept without `detach`.
    """

    tensors: TensorGroup
    steps: int
    in_graph: bool

    @property
    def bytes_per_step(self) -> int:
        """Bytes that each of those steps has added."""
        return self.tensors.bytes // self.steps


@dataclasses.dataclass(frozen=True)
class Filled:
    """What the device held at a moment.

    Attributes:
        bytes: of tensors, by the allocator on CUDA.
        tensors: the largest first.
        unseen: CUDA only: of `bytes`, what no tensor shows: libraries' workspaces, buffers within compiled code.
    """

    bytes: int
    tensors: tuple[TensorGroup, ...]
    unseen: int = 0


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """The moment when memory ran out.

    Attributes:
        message: the error's first line.
        step: in which.
        phase: "forward", "backward", "optimizer" or "loop".
        module: the module's name that ran; empty outside of modules.
        line: the user's, as `file:line, code`.
        filled: what was there.
        reserved: CUDA only: bytes that the allocator held from the driver.
        others: CUDA only: bytes of the device that are not PyTorch's: its context, NCCL, other processes.
        capacity: CUDA only: bytes of the device.
        fixes: what would help, the cheapest first, a line each.
    """

    message: str
    step: int
    phase: str
    module: str
    line: str
    filled: Filled
    reserved: int | None = None
    others: int | None = None
    capacity: int | None = None
    fixes: tuple[str, ...] = ()
