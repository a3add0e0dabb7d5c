"""Which out= overloads write where they are told, found by running them: the table of the static backend.

`python -m tests.out_overloads --write` makes the table anew (minutes) from PyTorch's own operator samples on CPU.
An overload's kind is "true" when some sample allocated nothing, "workspace" when all allocated less than their
results take, "copies" when it computes into fresh memory first, as generated overloads do, and "differs" when the
numbers were not those of the functional operator. `slices`: whether it also neither allocated nor differed where
operands and results were slices of larger tensors. `tests/static/test_forms.py` compares.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.static.write import LAYOUT, TABLE, number_like, out_overload
from tests.operators import database, samples_of
from tests.support import allocations

SAMPLES, EACH = 3, 4  # samples per operator of the database, calls per overload


class Calls(TorchDispatchMode):
    """Keeps the calls of functional operators with out= overloads, and copies of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable and out_overload(func) is not None:
            self.found.append((func, *pytree.tree_map(_copy, (args, kwargs))))
        return func(*args, **kwargs)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def others() -> Iterator[tuple[Any, Any, Any]]:
    """Calls of operators that the database does not reach, but captures and passes make."""
    matrix, vector = torch.randn(8, 8), torch.randn(8)
    for operator in (torch.ops.aten.clamp_min.default, torch.ops.aten.clamp_max.default):
        yield operator, (torch.randn(4, 6), 0.5), {}
    for gelu in (False, True):
        yield torch.ops.aten._addmm_activation.default, (vector, matrix, matrix), {"use_gelu": gelu}


def calls(only: str = "") -> Iterator[tuple[Any, Any, Any]]:
    """Calls of functional operators in float32, at most `EACH` per operator."""
    seen: dict[Any, int] = {}
    yield from (call for call in others() if only in str(call[0]))
    for name, op in database().items():
        if only not in name:
            continue
        for sample in samples_of(op, torch.float32, SAMPLES):
            with Calls() as mode, torch.no_grad():
                try:
                    op(sample.input, *sample.args, **sample.kwargs)
                except Exception:  # samples that this build refuses, each in its own way
                    continue
            for func, args, kwargs in mode.found:
                if seen.get(func, 0) < EACH and _plain((args, kwargs)):
                    seen[func] = seen.get(func, 0) + 1
                    yield func, args, kwargs


def _plain(operands: Any) -> bool:
    """Whether the operands are strided and not empty, and the floating-point ones of one dtype: no casts."""
    tensors = [leaf for leaf in pytree.tree_leaves(operands) if isinstance(leaf, torch.Tensor)]
    return (
        all(t.layout is torch.strided and t.numel() and not t.is_complex() for t in tensors)
        and len({t.dtype for t in tensors if t.is_floating_point()}) <= 1
    )


def as_slice(value: torch.Tensor) -> torch.Tensor:
    """An equal tensor inside a larger one, with strides of the larger."""
    if value.dim() < 2:
        return value
    shape = list(value.shape)
    shape[1] += 3
    larger = torch.zeros(shape, dtype=value.dtype)
    return larger.narrow(1, 1, value.shape[1]).copy_(value)


def examine(func: Any, args: Any, kwargs: Any) -> tuple[str, bool | None]:
    """The kind that one call shows, and whether slices work; None where nothing is large enough for a slice."""
    overload = out_overload(func)
    assert overload is not None
    expected = pytree.tree_leaves(func(*args, **kwargs))
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    kinds = [str(a.type) for a in overload._schema.arguments if not a.is_out]
    like = next(iter(tensors), expected[0])
    filled = tuple(
        number_like(value, like) if kind == "Tensor" and isinstance(value, (bool, int, float)) else value
        for kind, value in zip(kinds, args, strict=False)
    )
    kwargs = {name: value for name, value in kwargs.items() if name not in LAYOUT}
    fresh = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in expected]
    taken = _run(overload, filled, kwargs, fresh, expected)
    if taken is None:
        return "differs", None
    wanted = sum(t.numel() * t.element_size() for t in expected)
    kind = "true" if not taken else "workspace" if taken < wanted else "copies"
    if kind == "copies" or not all(t.dim() >= 2 for t in expected):
        return kind, None
    sliced = pytree.tree_map(lambda v: as_slice(v) if isinstance(v, torch.Tensor) else v, (filled, kwargs))
    outs = [as_slice(t) for t in fresh]
    if any(
        v.is_contiguous() for v in (*pytree.tree_leaves(sliced), *outs) if isinstance(v, torch.Tensor) and v.dim() > 1
    ):
        return kind, None  # a batch of one, say: nothing is seen
    return kind, _run(overload, *sliced, outs, expected) == 0


def _run(
    overload: Any, args: Any, kwargs: Any, outs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> int | None:
    """Bytes that the second call allocates; None when it fails or its numbers are others."""
    names = [a.name for a in overload._schema.arguments if a.is_out]
    given = dict(zip(names, outs, strict=True))
    addresses = [t.data_ptr() for t in outs]
    try:
        overload(*args, **kwargs, **given)
        taken = sum(size for size in allocations(lambda: overload(*args, **kwargs, **given)) if size > 0)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return None
    if [t.data_ptr() for t in outs] != addresses:
        return None
    same = all(torch.allclose(a, b, equal_nan=True) for a, b in zip(outs, expected, strict=True))
    return taken if same else None


def examine_all(only: str = "") -> dict[str, dict[str, Any]]:
    """The table's entries, by overload."""
    seen: dict[str, list[tuple[str, bool | None]]] = {}
    for func, args, kwargs in calls(only):
        torch.manual_seed(0)
        if torch.Tag.nondeterministic_seeded not in func.tags and "empty" not in str(func):
            seen.setdefault(str(out_overload(func)), []).append(examine(func, args, kwargs))
    order = ("true", "workspace", "copies", "differs")
    return {
        name: {
            "kind": "differs" if ("differs", None) in found else min((kind for kind, _ in found), key=order.index),
            "slices": (slices := {ok for _, ok in found} - {None}) == {True} and bool(slices),
        }
        for name, found in sorted(seen.items())
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine every overload, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.out_overloads", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--only", default="", help="the operators whose name contains this")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = examine_all(options.only)
    for kind in ("true", "workspace", "copies", "differs"):
        print(kind, sum(entry["kind"] == kind for entry in found.values()))
    if options.write:
        body = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items())
        TABLE.write_text(f'{{\n  "torch": "{torch.__version__}",\n  "overloads": {{\n{body}\n  }}\n}}\n')
    else:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
