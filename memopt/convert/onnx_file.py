"""Reading an ONNX file that may be broken or hostile: sizes and places are checked before anything is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx.external_data_helper import uses_external_data

from memopt.convert.errors import ConversionError
from memopt.errors import first_line

# What one protobuf message can hold at most.
_LARGEST_FILE = 2**31


def read_onnx(path: Path) -> ir.Model:
    """Read a model; weights in files beside it are mapped, not read.

    Raises:
        ConversionError: the file is no ONNX model, is cut off, or names weights that are not in its folder.
    """
    model = _parsed(path)
    for tensor in tensors(model):
        if uses_external_data(tensor):
            _check_external(tensor, path)
        else:
            _check_embedded(tensor, path)
    try:
        loaded = ir.load(path)
        for graph in loaded.graphs():
            for value in graph.initializers.values():
                if isinstance(value.const_value, ir.ExternalTensor):
                    # The same mapped memory, but no longer a place relative to a folder.
                    value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name)
    except Exception as error:
        raise ConversionError(f"{path} cannot be read: {first_line(error)}") from error
    return loaded


def external_files(path: Path) -> set[str]:
    """The files that a model's weights lie in, as the model names them; none where it cannot be read."""
    try:
        model = _parsed(path)
    except (ConversionError, OSError):
        return set()
    return {_place(tensor).get("location", "") for tensor in tensors(model) if uses_external_data(tensor)}


def size_of(path: Path) -> int:
    """Bytes of the file and of the weights beside it."""
    return path.stat().st_size + sum((path.parent / name).stat().st_size for name in external_files(path))


def _parsed(path: Path) -> onnx.ModelProto:
    if path.stat().st_size >= _LARGEST_FILE:
        raise ConversionError(f"{path} is larger than 2 GiB: no ONNX file is, its weights lie beside it then")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ConversionError(f"{path} is no ONNX model, or is cut off: {first_line(error)}") from error
    if model.ir_version <= 0 or not model.HasField("graph") or not model.opset_import:
        raise ConversionError(f"{path} is no ONNX model: it has no version, no graph or no operator set")
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and not 1 <= entry.version <= onnx.defs.onnx_opset_version():
            newest = onnx.defs.onnx_opset_version()
            raise ConversionError(f"{path} is for operator set {entry.version}: known are those up to {newest}")
    if model.training_info:
        raise ConversionError(f"{path} holds training information, which is not handled")
    return model


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the model: weights, and attributes of nodes, in subgraphs and functions as well."""
    nodes = [node for function in model.functions for node in function.node]
    graphs = [model.graph]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
            nodes.extend(graph.node)
            continue
        for attribute in nodes.pop().attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            graphs.extend(attribute.graphs)
            if attribute.HasField("g"):
                graphs.append(attribute.g)


def _check_external(tensor: onnx.TensorProto, path: Path) -> None:
    info = _place(tensor)
    location = info.get("location", "")
    where = f"{path}: the weights of {tensor.name or 'a constant'}"
    if not location or "\0" in location:
        raise ConversionError(f"{where} lie in a file without a name")
    if (
        PurePosixPath(location).is_absolute()
        or PureWindowsPath(location).is_absolute()
        or ".." in PureWindowsPath(location).parts
    ):
        raise ConversionError(f"{where} lie outside its folder ({location}): that is refused")
    file = path.parent / location
    folder = path.parent.resolve()
    if not file.resolve().is_relative_to(folder) or file.is_symlink():
        raise ConversionError(f"{where} lie outside its folder ({location}): that is refused")
    if not file.is_file():
        raise ConversionError(f"{where} lie in {location}, which does not exist")
    try:
        offset, size = int(info.get("offset", 0)), int(info.get("length", _bytes_of(tensor, path)))
    except ValueError as error:
        raise ConversionError(f"{where} have no readable place in {location}") from error
    if offset < 0:
        raise ConversionError(f"{where} begin before {location} does")
    if size != _bytes_of(tensor, path):
        raise ConversionError(f"{where} take {_bytes_of(tensor, path)} bytes, but the file says {size}")
    if offset + size > os.path.getsize(file):
        raise ConversionError(f"{where} end after {location} does: it is cut off")


def _place(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _check_embedded(tensor: onnx.TensorProto, path: Path) -> None:
    expected = _bytes_of(tensor, path)
    if tensor.HasField("raw_data") and len(tensor.raw_data) != expected:
        raise ConversionError(
            f"{path}: {tensor.name or 'a constant'} takes {expected} bytes, but {len(tensor.raw_data)} are there"
        )
    items = expected if tensor.data_type == onnx.TensorProto.STRING else _items(tensor)
    typed = (tensor.float_data, tensor.double_data, tensor.int32_data, tensor.int64_data, tensor.uint64_data)
    if not tensor.HasField("raw_data") and items and not any(typed) and not tensor.string_data:
        raise ConversionError(f"{path}: {tensor.name or 'a constant'} has {items} values, but none is there")


def _items(tensor: onnx.TensorProto) -> int:
    items = 1
    for size in tensor.dims:
        items *= size
    return items


def _bytes_of(tensor: onnx.TensorProto, path: Path) -> int:
    if any(size < 0 for size in tensor.dims):
        raise ConversionError(f"{path}: {tensor.name or 'a constant'} has a negative size")
    try:
        kind = ir.DataType(tensor.data_type)
    except ValueError as error:
        raise ConversionError(f"{path}: {tensor.name or 'a constant'} is of an unknown type") from error
    if kind is ir.DataType.UNDEFINED:
        raise ConversionError(f"{path}: {tensor.name or 'a constant'} is of an unknown type")
    if kind is ir.DataType.STRING:
        return _items(tensor)
    return -(-_items(tensor) * kind.bitwidth // 8)
