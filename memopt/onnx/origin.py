"""Where an ONNX node comes from: the module and the source line that made it."""

from __future__ import annotations

import ast
import re

import onnx_ir as ir

MODULE, SOURCE = "memopt.module", "memopt.source"

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n?\s*(?P<code>[^\n]*)')


def origin_of(node: ir.Node) -> dict[str, str]:
    """Module path and `file:line, code`, from the notes of torch's exporter; empty where there are none.

    Frames inside torch's own modules are passed over: the line is that of the model's code.
    """
    found = {}
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
    try:
        names = ast.literal_eval(scopes) if scopes else []
    except (SyntaxError, ValueError):
        names = []
    if len(names) > 1 and all(isinstance(name, str) for name in names) and not names[0]:
        found[MODULE] = str(names[-2])
    frames = [match.groupdict() for match in _FRAME.finditer(node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))]
    own = [frame for frame in frames if "/torch/" not in frame["file"].replace("\\", "/")]
    if own:
        last = own[-1]
        found[SOURCE] = f"{last['file']}:{last['line']}, {last['code'].strip()}".rstrip(", ")
    return found


def module_of(node: ir.Node) -> str:
    """The module that made the node, as noted by `origin_of` or as the names of older exporters say; else empty."""
    noted = node.meta.get(MODULE)
    if isinstance(noted, str):
        return noted
    name = node.name or ""
    return ".".join(part for part in name.split("/")[:-1] if part) if name.startswith("/") else ""


def source_of(node: ir.Node) -> str:
    """The source line that made the node, as noted by `origin_of`; else empty."""
    noted = node.meta.get(SOURCE)
    return noted if isinstance(noted, str) else ""
