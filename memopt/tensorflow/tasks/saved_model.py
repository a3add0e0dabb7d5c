"""Read a SavedModel: what one of its signatures computes, in float32 and float64; as ONNX; and compiled by XLA."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.eager.wrap_function import function_from_graph_def
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
from tensorflow.python.framework.tensor_util import MakeNdarray

# Operators that run Python, or touch files: a model needs none of them.
_UNSAFE = ("PyFunc", "PyFuncStateless", "EagerPyFunc", "ReadFile", "WriteFile", "MatchingFiles", "WholeFileReaderV2")
# Sizes for axes that the signature leaves open: tokens of a sentence, the edge of a picture.
_SEQUENCE, _EDGE = 16, 64
_REPEATS = 5


class Unsafe(ValueError):
    """The model asks for code to run, or for files."""

    kind = "unsafe"


class Inputs(ValueError):
    """The inputs, or the signature, do not fit the model."""

    kind = "inputs"


def run(request: dict[str, Any], folder: Any) -> dict[str, Any]:
    """Run a signature on made-up inputs, and do what is wanted with it.

    The request: `path`; `batch`, the examples of the first run; `signature`, or null for the only one or
    `serving_default`; `inputs`, shapes by name where the signature's own do not do; `want`: "onnx" (and the `opset`) or
    "xla". Tensors: `inputs_0`, …, `outputs_0`, …, and `wide_0`, … in float64 where TensorFlow can.

    Raises:
        ValueError: TensorFlow cannot load the file.
        Inputs: the signature does not run on the first inputs.
    """
    path = Path(request["path"])
    _refuse_unsafe(path)
    try:
        loaded = tf.saved_model.load(str(path))
    except Exception as error:
        raise ValueError(f"TensorFlow cannot load {path}: {_reason(error)}") from error
    name, function = _signature(loaded, request["signature"], path)
    frozen = convert_variables_to_constants_v2(function, lower_control_flow=False)
    specs = {key: function.structured_input_signature[1][key] for key in sorted(function.structured_input_signature[1])}
    batches = dict.fromkeys((request["batch"], request["batch"] + 1, 1))
    shapes = [_shapes(specs, request["inputs"], batch, first=number == 0) for number, batch in enumerate(batches)]
    sets = [made for number, made in enumerate(shapes) if made not in shapes[:number]]
    wide = _widened(frozen)
    results: list[dict[str, Any]] = []
    for number, sizes in enumerate(sets):
        arrays = {key: _values(specs[key], sizes[key], number) for key in specs}
        try:
            outputs = function(**{key: tf.constant(array) for key, array in arrays.items()})
        except Exception as error:
            if number == 0:
                raise Inputs(f"{path} cannot be run on {sizes}: {_reason(error)}") from error
            continue
        index = len(results)
        folder.write(f"inputs_{index}", arrays)
        folder.write(f"outputs_{index}", {key: outputs[key].numpy() for key in sorted(outputs)})
        reference = None if wide is None else _run_wide(wide, list(arrays.values()), sorted(outputs))
        if reference is not None:
            folder.write(f"wide_{index}", reference)
        results.append({"batch": _batch(specs, arrays), "wide": reference is not None})
    answer = {
        "signature": name,
        "inputs": [_entry(key, spec) for key, spec in specs.items()],
        "outputs": [_entry(key, function.structured_outputs[key]) for key in sorted(function.structured_outputs)],
        "sets": results,
        "weights": sum(value.numpy().nbytes for value in function.variables),
        "tensorflow": tf.__version__,
    }
    if request["want"] == "onnx":
        return {**answer, **_onnx(frozen, list(specs), answer["outputs"], request["opset"], folder)}
    arrays = folder.read("inputs_0")
    return {**answer, **measure(function, frozen, arrays, folder)}


# -- reading ----------------------------------------------------------------------------------------------------------


def _refuse_unsafe(path: Path) -> None:
    """Look at the graphs before TensorFlow loads them: loading runs their initializers."""
    model = saved_model_pb2.SavedModel()
    try:
        model.ParseFromString((path / "saved_model.pb").read_bytes())
    except DecodeError as error:
        raise ValueError(f"{path} is no SavedModel: saved_model.pb cannot be read") from error
    for graph in model.meta_graphs:
        functions = graph.graph_def.library.function
        for node in (*graph.graph_def.node, *(node for function in functions for node in function.node_def)):
            if node.op in _UNSAFE:
                raise Unsafe(f"{path} holds a {node.op} operator ({node.name}), which runs code or touches files")


def _signature(loaded: Any, wanted: str | None, path: Path) -> tuple[str, Any]:
    names = list(loaded.signatures)
    if wanted is None:
        wanted = "serving_default" if "serving_default" in names or len(names) != 1 else names[0]
    if wanted not in names:
        raise Inputs(f"{path} has no signature {wanted}: it has {', '.join(names) or 'none'}")
    function = loaded.signatures[wanted]
    for key, spec in function.structured_input_signature[1].items():
        if spec.dtype in (tf.string, tf.resource, tf.variant) or spec.shape.rank is None:
            raise Inputs(
                f"input {key} of {path} is {spec.dtype.name} of shape {spec.shape}: tensors of numbers are needed"
            )
    return wanted, function


def _shapes(specs: dict[str, Any], given: dict[str, list[int]], batch: int, *, first: bool) -> dict[str, list[int]]:
    for key, sizes in given.items():
        if key not in specs:
            raise Inputs(f"there is no input {key}: the signature takes {', '.join(specs)}")
        if not specs[key].shape.is_compatible_with(sizes):
            raise Inputs(f"input {key} is {specs[key].shape}, not {sizes}")
    found = {}
    for key, spec in specs.items():
        other = _EDGE if spec.shape.rank == 4 else _SEQUENCE
        own = list(given.get(key, spec.shape.as_list()))
        if key in given and own and spec.shape[0] is None and not first:
            own[0] = batch
        found[key] = [size if size is not None else batch if axis == 0 else other for axis, size in enumerate(own)]
    return found


def _values(spec: Any, sizes: Sequence[int], seed: int) -> Any:
    """Random floats; zeros and ones for integers (valid tokens and masks nearly everywhere)."""
    random = np.random.default_rng(seed)
    if spec.dtype.is_floating:
        return random.standard_normal(sizes).astype(spec.dtype.as_numpy_dtype)
    return random.integers(0, 2, sizes).astype(spec.dtype.as_numpy_dtype)


def _batch(specs: dict[str, Any], arrays: dict[str, Any]) -> int | None:
    sizes = [arrays[key].shape[0] for key, spec in specs.items() if spec.shape.rank and spec.shape[0] is None]
    return sizes[0] if sizes else None


def _entry(name: str, spec: Any) -> dict[str, Any]:
    shape = None if spec.shape.rank is None else spec.shape.as_list()
    return {"name": name, "dtype": spec.dtype.name, "shape": shape}


# -- float64 ----------------------------------------------------------------------------------------------------------


def _widened(frozen: Any) -> Any:
    """The frozen graph with float64 for every narrower float; None where it has functions of its own (loops)."""
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(frozen.graph.as_graph_def())
    if graph.library.function:
        return None
    narrow = {kind.as_datatype_enum for kind in (tf.float32, tf.float16, tf.bfloat16)}
    double = tf.float64.as_datatype_enum
    for node in graph.node:
        for value in node.attr.values():
            if value.type in narrow:
                value.type = double
            for index, kind in enumerate(value.list.type):
                if kind in narrow:
                    value.list.type[index] = double
            if value.HasField("tensor") and value.tensor.dtype in narrow:
                value.tensor.CopyFrom(tf.make_tensor_proto(MakeNdarray(value.tensor).astype(np.float64)))
    try:
        return function_from_graph_def(
            graph, [value.name for value in frozen.inputs], [value.name for value in frozen.outputs]
        )
    except Exception as error:  # an operator has no such kernel
        logging.info("no float64 reference: %s", error)
        return None


def _run_wide(wide: Any, arrays: Sequence[Any], names: Sequence[str]) -> dict[str, Any] | None:
    narrow = (np.float32, np.float16, ml_dtypes.bfloat16)
    try:
        found = wide(*[tf.constant(array.astype(np.float64) if array.dtype in narrow else array) for array in arrays])
    except Exception as error:
        logging.info("no float64 reference: %s", error)
        return None
    return {name: value.numpy() for name, value in zip(names, found, strict=True)}


# -- ONNX -------------------------------------------------------------------------------------------------------------


def _onnx(
    frozen: Any, inputs: Sequence[str], outputs: Sequence[dict[str, Any]], opset: int, folder: Any
) -> dict[str, Any]:
    import onnx
    import tf2onnx

    taken, given = [value.name for value in frozen.inputs], [value.name for value in frozen.outputs]
    try:
        model, _ = tf2onnx.convert.from_graph_def(
            frozen.graph.as_graph_def(), input_names=taken, output_names=given, opset=opset
        )
    except Exception as error:
        raise ValueError(f"tf2onnx cannot convert it: {_reason(error)}") from error
    onnx.save(model, folder.path / "model.onnx")
    return {"graph_inputs": dict(zip(taken, inputs, strict=True)), "graph_outputs": given}


# -- XLA --------------------------------------------------------------------------------------------------------------


def measure(function: Any, frozen: Any, arrays: dict[str, Any], folder: Any) -> dict[str, Any]:
    """Memory in bytes and time in seconds of the function: by TensorFlow's executor, and compiled by XLA through PJRT.

    Writes the results of the compiled function as `xla`.

    Raises:
        ValueError: XLA cannot compile it.
    """
    import jax
    from jax._src.lib import xla_client

    inputs = {key: tf.constant(array) for key, array in arrays.items()}
    seconds = _median(lambda: [value.numpy() for value in function(**inputs).values()])
    before = {"seconds": seconds, "peak": _executor_peak(frozen, list(arrays.values()))}

    compiled = tf.function(lambda **given: function(**given), jit_compile=True)
    try:
        module = compiled.experimental_get_compiler_ir(**inputs)(stage="stablehlo_serialized")
    except Exception as error:
        raise ValueError(f"XLA cannot compile it: {_reason(error)}") from error
    (folder.path / "module.bin").write_bytes(module)
    captured = [_captured(value) for value in compiled.get_concrete_function(**inputs).captured_inputs]
    device = jax.devices()[0]
    with jax.enable_x64(True):
        started = time.perf_counter()
        executable = device.client.compile_and_load(
            module, xla_client.DeviceList((device,)), xla_client.CompileOptions()
        )
        compiling = time.perf_counter() - started
        given = [jax.device_put(array, device) for array in (*arrays.values(), *captured)]

        def call() -> list[Any]:
            results = executable.execute_sharded(given).disassemble_into_single_device_arrays()
            return [np.asarray(result[0]) for result in results]

        names = sorted(function.structured_outputs)
        folder.write("xla", dict(zip(names, call(), strict=True)))
        seconds = _median(call)
    memory = executable.get_compiled_memory_stats()
    after = {
        "seconds": seconds,
        "compile_seconds": compiling,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
    }
    return {"before": before, "after": after, "platform": device.platform, "stablehlo_bytes": len(module)}


def _captured(value: Any) -> Any:
    if value.dtype != tf.resource:
        return value.numpy()
    kind = tf.as_dtype(value._handle_data.shape_and_type[0].dtype)
    return tf.raw_ops.ReadVariableOp(resource=value, dtype=kind).numpy()


def _executor_peak(frozen: Any, arrays: Sequence[Any]) -> int | None:
    """The most bytes that one run holds above its weights, from the executor's own record of allocations."""
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    record = tf.compat.v1.RunMetadata()
    feeds = {value.name: array for value, array in zip(frozen.inputs, arrays, strict=True)}
    fetches = [value.name for value in frozen.outputs]
    with tf.compat.v1.Session(graph=frozen.graph) as session:
        session.run(fetches, feeds)  # the first run prepares kernels and constants
        session.run(fetches, feeds, options=options, run_metadata=record)
    events = [
        (entry.alloc_micros, entry.alloc_bytes)
        for device in record.step_stats.dev_stats
        for node in device.node_stats
        for used in node.memory
        for entry in used.allocation_records
    ]
    held = peak = 0
    # What is freed and taken in one microsecond counts as held together.
    for _, size in sorted(events, key=lambda event: (event[0], -event[1])):
        held += size
        peak = max(peak, held)
    return peak if events else None


def _median(call: Any) -> float:
    call()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _reason(error: Exception) -> str:
    """The line of the message that says why: TensorFlow says first where."""
    idle = ("Graph execution error", "Detected at node", "<stack traces unavailable>", "Stack trace for op definition")
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line and not line.startswith(idle)), type(error).__name__)
