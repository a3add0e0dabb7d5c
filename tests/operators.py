"""PyTorch's own operator samples through capture and the inference pipeline, and the committed table of outcomes.

`python -m tests.operators --write` makes the table anew (minutes): one entry per operator and variant of `op_db`,
`"equal"`, or for each dtype the reason why samples are not, with their numbers. `tests/test_operators.py` compares.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import logging
import random
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

import memopt
from memopt.capture.export import CaptureError, from_module
from memopt.pass_manager import PassManager
from memopt.program import InputKind, OutputKind

TABLE = Path(__file__).with_name("operators.json")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
QUICK, FULL = 1, 8  # samples per entry and dtype
CHUNKS = 24
TOGETHER = 8  # operators whose quick samples are captured as one module

# What torch.export says, and what it means to a user. The first that matches is the reason.
_REFUSED = [
    (r"data-dependent|DataDependent|DynamicOutputShape|unbacked symbols|depends? on data",
     "refused: a shape or a branch depends on data"),
    (r"[Ss]parse", "refused: sparse tensors"),
    (r"Jiterator", "not on CPU: jiterator needs CUDA"),
    (r"LAPACK|lapack", "not in this build: LAPACK"),
    (r"TOKEN", "refused: the operator has side effects, which the export keeps with a token"),
    (r"[Qq]uantized", "refused: quantized tensors"),
]  # fmt: skip
_UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

Outcomes = dict[str, list[int]]  # reason → numbers of the samples
Entry = str | dict[str, Outcomes]  # "equal", or by dtype


class Calls(torch.nn.Module):
    """Operators applied to samples of theirs, whose tensors are the module's arguments; all else is part of it."""

    def __init__(self, calls: Sequence[tuple[Any, Any]]) -> None:
        super().__init__()
        self.forms, self.tensors = [], []
        for op, sample in calls:
            leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            self.tensors += [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.forms.append((op, spec, [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]))

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        remaining, found = iter(tensors), []
        for op, spec, leaves in self.forms:
            filled = [next(remaining) if leaf is None else leaf[0] for leaf in leaves]
            value, args, kwargs = pytree.tree_unflatten(filled, spec)
            found.append(op(value, *args, **kwargs))
        return found

    def values(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Fresh arguments of the samples' own layouts; floating-point ones as `dtype` if it is given."""
        fresh = [duplicate(tensor) for tensor in self.tensors]
        return [tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor for tensor in fresh]


def duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with a storage of its own, which is as large as the tensor's: views reach beyond their elements."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    storage = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def database() -> dict[str, Any]:
    """PyTorch's operator database, by name and variant, without what has no samples in float32 or float64 on CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as internal
    # Random operators are wrapped to seed themselves; here the seed is set outside, so that eager and program share it.
    internal.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    found = {}
    for op in internal.op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if any(dtype in op.supported_dtypes("cpu") for dtype in DTYPES.values()):
            found[name] = op
    return found


def samples_of(op: Any, dtype: torch.dtype, limit: int) -> list[Any]:
    """The operator's first samples, the same at every call; none for a dtype that it does not support."""
    if dtype not in op.supported_dtypes("cpu"):
        return []
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    # The function behind `op.sample_inputs`, which seeds each sample and inspects the whole stack.
    made = op.sample_inputs_func(op, "cpu", dtype, False)
    found = list(itertools.islice(made, limit))
    if inspect.isgenerator(made):  # it may hold no_grad, and would let go of it in the middle of a capture
        made.close()
    return found


def outcome(op: Any, samples: Sequence[Any]) -> str:
    """ "equal", or the reason why the samples' results are not. Anything but a refusal is raised.

    Raises:
        memopt.ProgramError, memopt.PassError, or whatever else fails: an internal error, never to be listed.
    """
    calls = Calls([(op, sample) for sample in samples])
    try:
        expected, found = both(calls)
    except Refused as error:
        return refusal(error.reason)
    except CaptureError as error:
        return refusal(error)
    if op.name in _UNINITIALISED:
        return "uninitialised memory: only shapes and dtypes agree" if same_kind(found, expected) else "differs: kind"
    if same_kind(found, expected) and all(map(same, found, expected)):
        return "equal"
    return compared(calls, found, expected)


def unequal(calls: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Operators whose samples, captured as one module with those of others, do not give bitwise what eager does.

    All of them where the module is refused.

    Raises:
        memopt.ProgramError, memopt.PassError, or whatever else fails: an internal error.
    """
    operators = [op for op, _ in calls]
    try:
        expected, found = both(Calls(calls))
    except (Refused, CaptureError):
        return operators
    if not same_kind(found, expected):
        return operators
    with torch.no_grad():
        torch.manual_seed(0)
        results = Calls(calls)
        each = zip(operators, results(*results.values()), strict=True)
        owners = [op for op, value in each for _ in pytree.tree_leaves(value)]
    return [op for op, one, other in zip(owners, found, expected, strict=True) if not same(one, other)]


class Refused(Exception):
    """Eager PyTorch itself does not run the samples, for the reason given."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def both(calls: Calls) -> tuple[list[Any], list[Any]]:
    """What eager returns, and what the captured and rewritten program does."""
    with torch.no_grad():
        torch.manual_seed(0)
        try:
            expected = pytree.tree_leaves(calls(*calls.values()))
        except (RuntimeError, AssertionError) as error:
            raise Refused(error) from error
    program = from_module(calls, calls.values())
    rewritten, _ = PassManager(memopt.INFERENCE).run(program)
    users = iter(calls.values())
    arguments = [
        rewritten.state[entry.name].clone() if entry.name in rewritten.state else next(users)
        for entry in rewritten.inputs
        if entry.kind is not InputKind.CONSTANT
    ]
    torch.manual_seed(0)
    results = rewritten.run(*arguments)
    found = [value for value, entry in zip(results, rewritten.outputs, strict=True) if entry.kind is OutputKind.USER]
    return expected, found


def refusal(error: Exception) -> str:
    text = f"{type(error.__cause__).__name__} {error}"
    for pattern, reason in _REFUSED:
        if re.search(pattern, text):
            return reason
    first = str(error).replace("torch.export cannot capture Calls: ", "").strip().splitlines()[0]
    return "refused: " + re.sub(r"0x[0-9a-f]+", "0x…", first)[:160]


def same_kind(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    def kind(value: Any) -> Any:
        return (value.dtype, value.layout, tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value)

    return list(map(kind, found)) == list(map(kind, expected))


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return bool(((a == b) | ((a != a) & (b != b))).all())


def compared(calls: Calls, found: Sequence[Any], expected: Sequence[Any]) -> str:
    """Results that are not bitwise equal: equal if about as near to the float64 results as eager's, else the reason."""
    if not same_kind(found, expected):
        return "differs: other shapes or dtypes than eager's"
    torch.manual_seed(0)
    with torch.no_grad():
        exact = pytree.tree_leaves(calls(*calls.values(torch.float64)))
    for value, eager, wide in zip(found, expected, exact, strict=True):
        if same(value, eager):
            continue
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return "differs: discrete results"
        scale = float(wide.abs().nan_to_num().max())
        error, allowed = (float((x.to(wide.dtype) - wide).abs().nan_to_num().max()) for x in (value, eager))
        if error > 2 * allowed + 16 * torch.finfo(value.dtype).eps * scale:
            return f"differs: {random_note(calls)}"
    return "equal"


def random_note(calls: Calls) -> str:
    torch.manual_seed(0)
    first = pytree.tree_leaves(calls(*calls.values()))
    torch.manual_seed(1)
    second = pytree.tree_leaves(calls(*calls.values()))
    if all(map(same, first, second)):
        return "the numbers are not eager's"
    return "torch.export's decomposition draws its random numbers in another order than eager"


def numbers_of(entry: Entry) -> dict[str, set[int]]:
    """By dtype, the samples that an entry lists as not equal."""
    outcomes = {} if isinstance(entry, str) else entry
    return {name: {i for numbers in outcomes.get(name, {}).values() for i in numbers} for name in DTYPES}


def expected_equal(op: Any, limit: int, expected: Entry) -> list[tuple[Any, Any]]:
    """Of an operator's first `limit` samples those that an entry says are equal, each beside the operator."""
    listed = numbers_of(expected)
    return [
        (op, sample)
        for name, dtype in DTYPES.items()
        for i, sample in enumerate(samples_of(op, dtype, limit))
        if i not in listed[name]
    ]


def examine(op: Any, limit: int, expected: Entry = "equal", known: bool = False) -> Entry:
    """The entry of one operator, over its first `limit` samples. Samples expected to be equal are captured together.

    Unless that is `known` of them already.
    """
    samples = {name: samples_of(op, dtype, limit) for name, dtype in DTYPES.items()}
    listed = numbers_of(expected)
    together = [s for name in DTYPES for i, s in enumerate(samples[name]) if i not in listed[name]]
    alone = {name: range(len(samples[name])) for name in DTYPES}
    if known or (together and outcome(op, together) == "equal"):
        alone = {name: sorted(i for i in listed[name] if i < len(samples[name])) for name in DTYPES}
    entry: dict[str, Outcomes] = {}
    for name, numbers in alone.items():
        for i in numbers:
            reason = outcome(op, [samples[name][i]])
            if reason != "equal":
                entry.setdefault(name, {}).setdefault(reason, []).append(i)
    return entry or "equal"


def restricted(entry: Entry, limit: int) -> Entry:
    """What the table's entry says of the first `limit` samples."""
    if isinstance(entry, str):
        return entry
    kept = {
        name: {reason: [i for i in numbers if i < limit] for reason, numbers in outcomes.items()}
        for name, outcomes in entry.items()
    }
    kept = {name: {r: n for r, n in outcomes.items() if n} for name, outcomes in kept.items()}
    return {name: outcomes for name, outcomes in kept.items() if outcomes} or "equal"


def read_table() -> dict[str, Any]:
    """The committed table: `torch`, the version that it was made with, and `entries`."""
    return json.loads(TABLE.read_text())  # type: ignore[no-any-return]


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine every operator, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.operators", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--only", default="", help="examine and print operators whose name contains this")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    entries: dict[str, Entry] = {}
    for name, op in database().items():
        if options.only in name:
            entries[name] = examine(op, FULL)
            if entries[name] != "equal":
                print(name, entries[name], file=sys.stderr, flush=True)
    equal = sum(entry == "equal" for entry in entries.values())
    print(f"{equal} of {len(entries)} equal")
    if options.write:
        rows = [f"    {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries)]
        body = ",\n".join(rows)
        TABLE.write_text(f'{{\n  "torch": "{torch.__version__}",\n  "entries": {{\n{body}\n  }}\n}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
