"""An inference program from torch.export."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind as ExportInputKind
from torch.export.graph_signature import OutputKind as ExportOutputKind

from memopt.common.quiet import quiet
from memopt.errors import first_line
from memopt.graph.result_memory import write_out_reductions
from memopt.program import Input, InputKind, Output, OutputKind, Program, source_line
from memopt.torch_compat import pytree
from memopt.torch_compat.exporting import composites, written_out
from memopt.torch_compat.fake_tensors import no_fake_mode

_INPUT_KINDS = {
    ExportInputKind.PARAMETER: InputKind.PARAMETER,
    ExportInputKind.BUFFER: InputKind.BUFFER,
    ExportInputKind.CONSTANT_TENSOR: InputKind.CONSTANT,
    ExportInputKind.USER_INPUT: InputKind.USER,
}
_OUTPUT_KINDS = {
    ExportOutputKind.USER_OUTPUT: OutputKind.USER,
    ExportOutputKind.BUFFER_MUTATION: OutputKind.MUTATION,
    ExportOutputKind.USER_INPUT_MUTATION: OutputKind.MUTATION,
    ExportOutputKind.PARAMETER_MUTATION: OutputKind.MUTATION,
}


class CaptureError(RuntimeError):
    """The model cannot be captured as a program; the message says where and what to do."""


class NotCapturedError(CaptureError):
    """Nothing can be planned, as torch.compile takes no graph of the model; PyTorch itself runs it."""


class NotTracedError(NotCapturedError):
    """Torch's tracer fails at a line of the model, though torch.compile should take it or break the graph there."""


def from_module(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Program:
    """Capture `model(*args, **kwargs)` in its present mode, without gradients, at the given shapes.

    Raises:
        CaptureError: torch.export cannot capture the model (data-dependent control flow, say).
    """
    try:
        with torch.no_grad(), quiet():
            exported = torch.export.export(model, tuple(args), dict(kwargs or {}), strict=False)
    except Exception as error:
        raise CaptureError(f"torch.export cannot capture {type(model).__name__}: {first_line(error)}") from error
    return from_exported_program(exported)


_PLAIN = "only tensors and numbers may go in and out, without tokens or custom objects"


def from_exported_program(exported: ExportedProgram) -> Program:
    """Lower an ExportedProgram to functional ATen operations and name the roles of its inputs and outputs.

    Composite operators are decomposed as eager PyTorch would; fused ones (addmm, layer norm, attention) stay whole.

    Raises:
        CaptureError: the program has inputs or outputs of a kind that memopt does not know (tokens, custom objects),
            tensors that are not strided, or shapes that are not fixed; or its views do not fit its inputs' layouts.
    """
    lowered = _decomposed(exported)
    signature = lowered.graph_signature
    program = Program(fx.GraphModule(lowered.graph_module, lowered.graph), (), ()).copy()
    for node in program.graph.nodes:
        _refuse_unsupported(node)
    write_out_reductions(program.graph)
    # torch.fx renames a placeholder that is called like a Python builtin ("input", which nn.Sequential takes).
    exported_names = [node.name for node in lowered.graph.nodes if node.op == "placeholder"]
    renamed = dict(zip(exported_names, (node.name for node in program.placeholders), strict=True))
    inputs, state = [], {}
    for spec in signature.input_specs:
        name = renamed.get(getattr(spec.arg, "name", ""))
        if spec.kind not in _INPUT_KINDS or name is None:
            raise CaptureError(f"input {spec.arg} is of kind {spec.kind.name}, which memopt does not support: {_PLAIN}")
        inputs.append(Input(name, _INPUT_KINDS[spec.kind], spec.target))
        if spec.target is not None:
            found = lowered.state_dict.get(spec.target, lowered.constants.get(spec.target))
            if isinstance(found, torch.Tensor):
                state[name] = found.detach()
    names = {entry.target: entry.name for entry in inputs if entry.target is not None}
    outputs = []
    for output in signature.output_specs:
        if output.kind not in _OUTPUT_KINDS:
            raise CaptureError(f"an output is of kind {output.kind.name}, which memopt does not support: {_PLAIN}")
        kind = _OUTPUT_KINDS[output.kind]
        target = output.target if kind is OutputKind.MUTATION else None
        outputs.append(Output(kind, names.get(target, renamed.get(target)) if target is not None else None))
    try:
        return program.finish(inputs=tuple(inputs), outputs=tuple(outputs), state=state)
    except (ValueError, RuntimeError) as error:
        # torch.export may record layouts that its own tracing settings gave, and views that real layouts do not allow.
        text = f"the exported program does not hold at the layouts of its inputs: {first_line(error)}"
        raise CaptureError(f"{text}: export it with contiguous() inputs, or reshape() in place of view()") from error


def _decomposed(exported: ExportedProgram) -> ExportedProgram:
    """`run_decompositions` with every composite operator in its table, and no other operator.

    That overrides the 520 composite operators that there are for each call, 0.2 s; here those in the graph, and those
    that torch decomposes in Python: the others decompose so by themselves.
    """
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]
    present = {node.target for graph in graphs for node in graph.nodes}
    chosen = {op: decompose for op, decompose in _composites().items() if op in present or op.py_kernels}
    with no_fake_mode():
        return written_out(exported, chosen)


@functools.cache
def _composites() -> dict[Any, Any]:
    return composites()


# What makes tensors that are not strided, by words of the operator's name, and what to write instead.
_STRIDED = {
    "_sparse_coo_tensor": "hand over a dense tensor, or give the embedding sparse=False where this is its gradient",
    "to_sparse": "leave to_sparse() out, or do it outside of the model",
    "embedding_bag_": "give the embedding bag sparse=False",
}


def refuse_layouts(node: fx.Node) -> None:
    """Raise CaptureError where a node's value is a sparse tensor, or of another layout that is not strided."""
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            where = f"{node.name} ({source_line(node) or 'source unknown'})"
            way = next((way for words, way in _STRIDED.items() if words in str(node.target)), "call to_dense() on it")
            raise CaptureError(f"{where} is a {leaf.layout} tensor: only strided tensors are supported: {way}")


_FIXED = "fixed shapes are needed: pad to a fixed size, mask instead of selecting, and keep item() out of the model"


def _refuse_unsupported(node: fx.Node) -> None:
    refuse_layouts(node)
    where = f"{node.name} ({source_line(node) or 'source unknown'})"
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        sizes = leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
            raise CaptureError(f"{where} has a size or a value that depends on data or varies: {_FIXED}")
