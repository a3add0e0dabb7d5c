"""A training graph's code from torch's cache, for what memopt decides by beside graph, inputs and torch's settings."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memopt.capture.dynamo import Hooks
from memopt.common.phases import phase
from memopt.inductor.generated import GeneratedCode
from memopt.inductor.joint_cache import AbsentError, JointCache
from memopt.inductor.partition import Partition, compile_training
from memopt.torch_compat.inductor_compile import backward_begins_with
from memopt.torch_compat.returned import writable


@dataclasses.dataclass(frozen=True)
class RecalledCode:
    """Both graphs of a step, loaded.

    Attributes:
        run: the step.
        forward, backward: the code of both.
    """

    run: Callable[..., Any]
    forward: GeneratedCode
    backward: GeneratedCode


def recalled(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks, cache: JointCache, facts: bytes
) -> RecalledCode | None:
    """The code; None where the cache does not have it.

    Args:
        graph_module: Dynamo's graph.
        example_inputs: its inputs.
        hooks: of the graph.
        cache: learns the graph's key.
        facts: what memopt decides by.
    """
    partition = Partition(_untraced)
    partition.token = facts
    known = functools.partial(writable, in_part=lambda: [item.place for item in hooks.known_facts.in_part])
    forward, backward = GeneratedCode(known), GeneratedCode()
    try:
        with phase("looking for code"), backward_begins_with(hooks.backward):
            looking = cache.looking(forward, backward)
            run = compile_training(graph_module, example_inputs, _untraced, partition, cached=looking)
            forward.load()
            backward.load()
    except AbsentError:
        return None
    return RecalledCode(run, forward, backward)


def digest_of(forward: GeneratedCode | None, backward: GeneratedCode | None) -> str:
    """What tells the code of forward and backward graph from other code; empty where one has none."""
    if forward is None or backward is None or forward.wrapper is None or backward.wrapper is None:
        return ""
    text = f"{forward.wrapper.source}\0{backward.wrapper.source}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _untraced(*_: Any, **__: Any) -> Any:
    raise AssertionError("a step that is only looked for is neither cut nor lowered")
