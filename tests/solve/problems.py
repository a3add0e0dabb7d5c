"""Random training steps for the planner's tests."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from memopt.solve.problem import StepProblem


@st.composite
def step_problems(draw, operations: int = 14, all_recomputable: bool = False) -> StepProblem:
    """Draw a step: random reads, operations with 0 to 3 outputs, pinned, resident and arriving storages, workspace."""
    forward = draw(st.integers(0, operations))
    backward = draw(st.integers(0, operations - forward))
    resident = draw(st.integers(0, 2))
    arriving = draw(st.integers(0, 2))
    small = st.integers(0, 9)
    sizes = [draw(small) for _ in range(resident + arriving)]
    known = list(range(resident))
    reads, writes = [], []
    for operation in range(forward + backward):
        if operation == forward:
            known += range(resident, resident + arriving)
        reads.append(tuple(draw(st.lists(st.sampled_from(known), unique=True, max_size=4))) if known else ())
        made = tuple(range(len(sizes), len(sizes) + draw(st.sampled_from((1, 1, 1, 1, 2, 3, 0)))))
        writes.append(made)
        sizes += [draw(small) for _ in made]
        known += made
    count = forward + backward
    flags = st.just(True) if all_recomputable else st.sampled_from((True, True, True, False))
    return StepProblem(
        sizes=tuple(sizes),
        reads=tuple(reads),
        writes=tuple(writes),
        costs=tuple(float(draw(st.integers(0, 5))) for _ in range(count)),
        workspace=tuple(draw(st.sampled_from((0, 0, 0, 3))) for _ in range(count)),
        forward=forward,
        recomputable=tuple(draw(flags) for _ in range(count)),
        pinned=frozenset(draw(st.sets(st.sampled_from(range(len(sizes))), max_size=2))) if sizes else frozenset(),
        resident=frozenset(range(resident)),
        arriving=frozenset(range(resident, resident + arriving)),
    )


def chain(length: int, size: int = 1) -> StepProblem:
    """Return a chain of layers: backward reads each layer's output and its gradient; the last gradient is pinned."""
    gradients = range(length + 1, 2 * length + 1)
    forward_reads = [(layer,) for layer in range(length)]
    backward_reads = [(length - at, *gradients[at - 1 : at]) if at else (length,) for at in range(length)]
    return StepProblem(
        sizes=(size,) * (2 * length + 1),
        reads=(*forward_reads, *backward_reads),
        writes=(*((layer + 1,) for layer in range(length)), *((gradient,) for gradient in gradients)),
        costs=(1.0,) * (2 * length),
        workspace=(0,) * (2 * length),
        forward=length,
        recomputable=(True,) * length + (False,) * length,
        pinned=frozenset({2 * length}),
        resident=frozenset({0}),
    )


def skips(layers: int, seed: int) -> StepProblem:
    """Return layers of differing size and cost that also read an earlier layer; backward reads output and input."""
    draw = random.Random(seed)
    gradients = range(layers + 1, 2 * layers + 1)
    forward_reads = [tuple(sorted({layer, draw.randint(max(0, layer - 4), layer)})) for layer in range(layers)]
    backward_reads = [(layers - at, layers - at - 1, *gradients[:at][-1:]) for at in range(layers)]
    sizes = [draw.choice((4, 8, 16)) for _ in range(layers)]
    return StepProblem(
        sizes=(0, *sizes, *(4,) * layers),
        reads=(*forward_reads, *backward_reads),
        writes=tuple((storage,) for storage in range(1, 2 * layers + 1)),
        costs=(*(draw.choice((1.0, 2.0, 5.0)) for _ in range(layers)), *(2.0,) * layers),
        workspace=(0,) * (2 * layers),
        forward=layers,
        recomputable=(True,) * layers + (False,) * layers,
        pinned=frozenset({2 * layers}),
        resident=frozenset({0}),
    )
