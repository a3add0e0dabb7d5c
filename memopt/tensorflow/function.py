"""A graph as a function of TensorFlow in this process, on PyTorch's tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import fx

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported

import jax
import jax.export
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from memopt.xla.executable import attributes_to_inputs
from memopt.xla.lower import lower, precision
from memopt.xla.table import LowerError


def function_of(
    module: fx.GraphModule, fixed: Mapping[int, torch.Tensor]
) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
    """Lower a graph, and have TensorFlow call it with `jit_compile=True` on the CPU.

    Args:
        module: a functional ATen graph.
        fixed: arguments that stay as they are, by position: TensorFlow keeps a copy.

    Returns:
        A function from all of the graph's arguments to its results that are tensors, in order and contiguous.

    Raises:
        LowerError: an operator has no lowering, or the graph draws random numbers.
    """
    with contextlib.suppress(RuntimeError):  # TensorFlow has started its threads before
        tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    count = len(module.graph.find_nodes(op="placeholder"))
    whole, held = attributes_to_inputs(module)
    lowered = lower(whole, platform="cpu")
    if lowered.random:
        raise LowerError("the graph draws random numbers: TensorFlow would draw others than PyTorch")
    results: Any = whole.graph.output_node().args[0]
    tensors = [isinstance(node, fx.Node) and isinstance(node.meta["val"], torch.Tensor) for node in results]
    arguments = lowered.arguments()
    taken = [index for index, argument in enumerate(arguments) if argument is not None]

    def call(*given: Any) -> list[Any]:
        values: list[Any] = [None] * len(arguments)
        for index, value in zip(taken, given, strict=True):
            values[index] = value
        return [value for value, tensor in zip(lowered.function(*values), tensors, strict=True) if tensor]

    with precision(lowered.x64):
        exported = jax.export.export(jax.jit(call), platforms=["cpu"])(*(arguments[index] for index in taken))
    kept = [(taken[place], exported.in_avals[place].dtype) for place in exported.module_kept_var_idx]
    kinds = [tf.as_dtype(value.dtype) for value in exported.out_avals]
    shapes = [tf.TensorShape(value.shape) for value in exported.out_avals]

    @tf.function(jit_compile=True, autograph=False)  # type: ignore[untyped-decorator]
    def compiled(*given: Any) -> Any:
        return xla.call_module(
            list(given),
            version=exported.calling_convention_version,
            module=exported.mlir_module_serialized,
            Tout=kinds,
            Sout=shapes,
            platforms=["CPU"],
        )

    own = {**fixed, **dict(enumerate(held.values(), start=count))}
    constants = {index: tf.constant(_array(own[index], dtype)) for index, dtype in kept if index in own}

    def run(values: Sequence[Any]) -> list[torch.Tensor]:
        given = [
            constants[index] if index in constants else tf.constant(_array(values[index], dtype))
            for index, dtype in kept
        ]
        return [_tensor(value.numpy()) for value in compiled(*given)]

    return run


def _array(tensor: torch.Tensor, dtype: Any) -> Any:
    plain = tensor.detach().contiguous()
    if plain.dtype is torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array = plain.numpy()
    return array if array.dtype == dtype else array.astype(dtype)  # JAX narrows 64-bit tensors that nothing reads


def _tensor(array: Any) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, copy=True, order="C"))
