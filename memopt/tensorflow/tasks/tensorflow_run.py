"""Run a signature of a SavedModel, as whoever serves it would: TensorFlow alone."""

from __future__ import annotations

import sys
import time
from typing import Any

import tensorflow as tf


def run(request: dict[str, Any], folder: Any) -> dict[str, Any]:
    """Run on the tensors `inputs_0`, `inputs_1`, …, and write `outputs_0`, …

    The request: `path`, `signature`, and how many `sets` of inputs there are. The answer: seconds of each first call,
    which compiles, and of a second one; the memory of the executable for the first set, in bytes.

    Raises:
        ValueError: TensorFlow cannot run it.
    """
    loaded = tf.saved_model.load(request["path"])
    function = loaded.signatures[request["signature"]]
    first: list[float] = []
    later: list[float] = []
    for number in range(request["sets"]):
        inputs = {name: tf.constant(array) for name, array in folder.read(f"inputs_{number}").items()}
        for seconds in (first, later):
            started = time.perf_counter()
            try:
                outputs = {name: value.numpy() for name, value in function(**inputs).items()}
            except tf.errors.OpError as error:
                raise ValueError(f"TensorFlow cannot run it: {_reason(error)}") from error
            seconds.append(time.perf_counter() - started)
        folder.write(f"outputs_{number}", outputs)
    inputs = {name: tf.constant(array) for name, array in folder.read("inputs_0").items()}
    return {"first": first, "later": later, "torch": "torch" in sys.modules, "memory": _memory(function, inputs)}


def _reason(error: Exception) -> str:
    """The line of the message that says why: TensorFlow says first where."""
    idle = ("Graph execution error", "Detected at node", "<stack traces unavailable>", "Stack trace for op definition")
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line and not line.startswith(idle)), type(error).__name__)


def _memory(function: Any, inputs: dict[str, Any]) -> dict[str, int]:
    """Bytes of the executable by what they are for, from the compiler's own assignment of buffers."""
    from tensorflow.compiler.xla.service import hlo_pb2

    compiled = tf.function(lambda **given: function(**given), jit_compile=True)
    proto = hlo_pb2.HloProto()
    proto.ParseFromString(compiled.experimental_get_compiler_ir(**inputs)(stage="optimized_hlo_proto_serialized"))
    found = {"arguments": 0, "outputs": 0, "temporaries": 0, "constants": 0}
    for buffer in proto.buffer_assignment.buffer_allocations:
        if buffer.is_entry_computation_parameter:
            found["arguments"] += buffer.size
        elif buffer.is_constant:
            found["constants"] += buffer.size
        elif buffer.maybe_live_out:
            found["outputs"] += buffer.size
        else:
            found["temporaries"] += buffer.size
    return found
