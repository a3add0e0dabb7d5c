"""Evidence: numerical proof that a rewritten program computes what the one before it computed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from memopt.difference.regions import Region, differing_regions
from memopt.errors import first_line
from memopt.graph.synthesis import same_random_state, synthesize
from memopt.graph.weights import joined, same_source
from memopt.program import Program, is_random
from memopt.torch_compat import pytree

Verification = bool | Literal["full"]

# Larger regions are not run, so that proof never takes the memory that the budget is about.
REGION_BYTES = 512 * 2**20
# A region's run holds its values up to so many times: before, after, and in float64.
_COPIES = 5
# Regions of one structure that are run: the blocks of a deep model differ in their weights only.
_SAME_STRUCTURE = 3
# Layers of operations before a region that are run with it, tried in turn.
_CONTEXTS = (0, 1, 2, 4, 8)
# Errors below this many units in the last place of the largest value are rounding of any correct program.
_FLOOR_ULP = 8
# Runs of the program before that show whether its kernels add up in any order, as flash attention's backward does.
_REPEATS = 4
# How many times the largest float64 error of such runs another one may have.
_NOISE = 2.0
# In float64 the program before is its own reference, and how exact that is cannot be seen.
_FLOOR_ULP_WIDEST = 256


class EvidenceError(RuntimeError):
    """The rewritten program's numbers differ by more than the pass declares."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Proof of one pass.

    Attributes:
        scope: "regions" or "program": what was compared.
        regions: how many separate regions the pass changed.
        proved: how many of them were run; the rest have the structure of a proved one, or are in `unproved`.
        max_abs_error: the largest difference between before and after.
        max_ulp: the same in units in the last place of the value before.
        error_ratio: the largest float64 error after, over that before; 1.0 where both are exact.
        unproved: one line for each region that was not run, with the reason.
    """

    scope: str
    regions: int
    proved: int
    max_abs_error: float
    max_ulp: float
    error_ratio: float
    unproved: tuple[str, ...] = ()


def prove(
    before: Program, after: Program, tolerance: float, verify: Verification, available: int | None = None
) -> Evidence:
    """Run what differs between the programs on the same random inputs, beside a float64 reference.

    Args:
        before, after: programs with the same inputs and outputs; weights are taken from `after.state`.
        tolerance: 0.0 asks for bitwise equality; else the error after may reach this many times the error before.
            Where the program before differs from itself when it is run again (kernels that add up in any order), the
            error after may in either case reach twice the largest of its runs. Integers, complex numbers, NaN and
            outputs that are no tensors must be equal always.
        verify: "full" compares the whole programs too.
        available: the most bytes that the proof of a region may take; None: regions up to 512 MiB are run.

    Raises:
        EvidenceError: the numbers differ by more than that; the message names the node.
    """
    limit = REGION_BYTES if available is None else max(0, min(REGION_BYTES, available // _COPIES))
    _same_constants(before, after)
    _same_plain_outputs(before, after)
    state = joined(before.state, after.state)  # found where it is asked for: a region reads few weights
    try:
        regions, tally = _prove_regions(differing_regions(before, after), state, _Tally(tolerance, limit))
    except EvidenceError:
        # A name may stand for another value than before: only what reaches the outputs counts then.
        regions, tally = _prove_with_context(before, after, state, tolerance, limit)
    if verify == "full":
        tally.compare(_whole(before, after), state, whole=True)
    return Evidence(
        "program" if verify == "full" else "regions",
        len(regions),
        tally.proved,
        tally.max_abs,
        tally.max_ulp,
        tally.ratio,
        tuple(tally.unproved),
    )


def _prove_with_context(
    before: Program, after: Program, state: Mapping[str, torch.Tensor], tolerance: float, limit: int
) -> tuple[list[Region], _Tally]:
    """Prove regions that begin some operations earlier, until made-up inputs respect what a rewrite rests on."""
    for context in _CONTEXTS:
        try:
            regions, tally = _prove_regions(
                differing_regions(before, after, cut=False, context=context), state, _Tally(tolerance, limit)
            )
        except EvidenceError as error:
            failure = error
        else:
            if not context or not tally.unproved:  # a region that failed before and is now too large stays failed
                return regions, tally
    raise failure


def _prove_regions(
    regions: list[Region], state: Mapping[str, torch.Tensor], tally: _Tally
) -> tuple[list[Region], _Tally]:
    seen: Counter[str] = Counter()
    for region in regions:
        seen[region.structure] += 1
        if seen[region.structure] <= _SAME_STRUCTURE:
            tally.compare(region, state)
    return regions, tally


class _Tally:
    def __init__(self, tolerance: float, limit: int) -> None:
        self.tolerance, self.limit = tolerance, limit
        self.proved = 0
        self.max_abs = self.max_ulp = 0.0
        self.ratio = 1.0
        self.unproved: list[str] = []

    def compare(self, region: Region, state: Mapping[str, torch.Tensor], *, whole: bool = False) -> None:
        first = region.after[0].name if region.after else region.before[0].name
        limit = REGION_BYTES if whole else self.limit
        if region.bytes > limit:
            self.unproved.append(f"{first}: the region takes {region.bytes} bytes, above {limit}")
            return
        try:
            with torch.no_grad(), _exact_convolutions(), same_random_state(_fakes(region)):
                found, expected, reference, again = _run_region(region, state)
        except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
            reason = first_line(error)
            self.unproved.append(f"{first}: cannot be run on made-up inputs ({reason})")
            return
        self.proved += 1
        repeated: list[list[Any]] = []

        def runs(index: int) -> list[Any]:
            """One leaf of the results before, as each of several more runs has it."""
            if not repeated:
                with torch.no_grad(), _exact_convolutions(), same_random_state(_fakes(region)):
                    repeated.extend(pytree.tree_leaves(again()) for _ in range(_REPEATS))
            return [leaves[index] for leaves in repeated]

        names = [
            (old.name, new.name)
            for (old, new), value in zip(region.results, expected, strict=True)
            for _ in pytree.tree_leaves(value)
        ]
        leaves = (pytree.tree_leaves(values) for values in (expected, found, reference))
        for index, ((old, new), x, y, z) in enumerate(zip(names, *leaves, strict=True)):
            self._leaf(old if old == new else f"{new} (before: {old})", x, y, z, partial(runs, index))

    def _leaf(
        self, where: str, expected: Any, found: Any, reference: Any, runs: Callable[[], list[torch.Tensor]]
    ) -> None:
        if not isinstance(expected, torch.Tensor):
            if expected != found:
                raise EvidenceError(f"{where}: is {found!r}, was {expected!r}")
            return
        if _bitwise_equal(expected, found):
            return
        abs_error, ulp = _difference(expected, found)
        self.max_abs, self.max_ulp = max(self.max_abs, abs_error), max(self.max_ulp, ulp)
        unequal = f"results differ by up to {abs_error:.3g} ({ulp:.3g} ulp), bitwise equality declared"
        if not expected.is_floating_point():
            raise EvidenceError(f"{where}: {unequal}")
        tolerance, before, after = self.tolerance, _error(expected, reference), _error(found, reference)
        floor = _floor(expected, reference)
        if tolerance == 0.0 or after > tolerance * before + floor:
            others = runs()
            if any(not _bitwise_equal(expected, other) for other in others):
                tolerance = max(tolerance, _NOISE)
                before = max(before, *(_error(other, reference) for other in others))
            elif tolerance == 0.0:
                raise EvidenceError(f"{where}: {unequal}")
        if not torch.equal(torch.isnan(expected), torch.isnan(found)):
            raise EvidenceError(f"{where}: NaN where there was none, or the other way round")
        if (found.isinf() & (found != expected) & (found.double() != reference)).any():
            raise EvidenceError(f"{where}: infinite where it was not")
        self.ratio = max(self.ratio, after / before if before > 0 else (1.0 if after <= floor else math.inf))
        if after > tolerance * before + floor:
            raise EvidenceError(
                f"{where}: float64 error {after:.3g} after, {before:.3g} before: more than {tolerance:g} times"
            )


def _floor(expected: torch.Tensor, reference: torch.Tensor) -> float:
    """The error that rounding alone explains."""
    scale = torch.nan_to_num(reference.abs(), nan=0.0, posinf=0.0).max().item() if reference.numel() else 0.0
    units = _FLOOR_ULP_WIDEST if expected.dtype == torch.float64 else _FLOOR_ULP
    return float(units * torch.finfo(expected.dtype).eps * scale)


@contextlib.contextmanager
def _exact_convolutions() -> Iterator[None]:
    """Convolutions in float32 use no TF32: cuDNN does for some shapes and layouts alone, whatever a rewrite did."""
    settings: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    chosen = settings.fp32_precision
    if chosen != "tf32":
        yield
        return
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = chosen


def _run_region(
    region: Region, state: Mapping[str, torch.Tensor]
) -> tuple[list[Any], list[Any], list[Any], Callable[[], list[Any]]]:
    """Results after, before and in float64, and what runs the part before again."""
    olds, news = ([pair[side] for pair in region.results] for side in (0, 1))
    for positive in (False, True):
        old_inputs, new_inputs = _region_inputs(region, state, positive)
        drawn: dict[str, Any] = {}
        torch.manual_seed(0)
        expected = execute(region.before, old_inputs, olds, record=drawn)
        torch.manual_seed(0)
        found = execute(region.after, new_inputs, news)
        if positive or not any(_has_nan(leaf) for leaf in pytree.tree_leaves(expected)):
            break

    def again() -> list[Any]:
        torch.manual_seed(0)
        return execute(region.before, old_inputs, olds)

    wide = {name: widen(value) for name, value in old_inputs.items()}
    try:
        reference = execute(region.before, wide, olds, replay=drawn, wide=True)
    except (RuntimeError, NotImplementedError):
        reference = [
            widen(value) for value in expected
        ]  # an operator without a float64 kernel: before is the reference
    return found, expected, reference, again


def _region_inputs(region: Region, state: Mapping[str, torch.Tensor], positive: bool) -> list[dict[str, Any]]:
    """Values of what each part reads, by name: the same one wherever the numbers agree."""
    made: dict[int, Any] = {}
    sides = (region.inputs_before, region.inputs_after)
    for side in sides:
        made.update({number: state[node.name] for node, number in side.items() if node.name in state})
    for side in sides:
        for node, number in side.items():
            if number not in made and node.op == "get_attr":  # what a branch or a loop runs
                made[number] = operator.attrgetter(str(node.target))(node.graph.owning_module)
            if number not in made:
                value = synthesize(node.meta["val"])
                made[number] = pytree.tree_map_only(torch.Tensor, _positive, value) if positive else value
    return [{node.name: made[number] for node, number in side.items()} for side in sides]


def execute(
    nodes: Sequence[fx.Node],
    inputs: Mapping[str, Any],
    wanted: Sequence[fx.Node],
    *,
    record: dict[str, Any] | None = None,
    replay: Mapping[str, Any] | None = None,
    wide: bool = False,
) -> list[Any]:
    """Run the nodes in order. `record` keeps what random nodes drew, `replay` uses it; `wide` computes in float64."""
    values = dict(inputs)
    for node in nodes:
        if replay is not None and node.name in replay:
            values[node.name] = widen(replay[node.name])
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
        if wide:
            args, kwargs = pytree.tree_map(_widen_dtype, (args, kwargs))
        values[node.name] = node.target(*args, **kwargs)  # type: ignore[operator]
        if record is not None and is_random(node):
            record[node.name] = values[node.name]
    return [values[node.name] for node in wanted]


def _whole(before: Program, after: Program) -> Region:
    pairs = [
        (a, b)
        for a, b in zip(before.output_nodes, after.output_nodes, strict=True)
        if isinstance(a, fx.Node) and isinstance(b, fx.Node)
    ]
    old = {node: number for number, node in enumerate(before.placeholders)}
    by_name = {node.name: number for node, number in old.items()}
    new = {node: by_name.get(node.name, -1 - number) for number, node in enumerate(after.placeholders)}
    return Region(tuple(before.calls), tuple(after.calls), tuple(pairs), 0, "program", old, new)


def _same_constants(before: Program, after: Program) -> None:
    """What has one name in both programs is one value: regions are not grown around inputs."""
    for name in before.state.keys() & after.state.keys():
        if same_source(before.state, after.state, name):
            continue
        if not _bitwise_equal(before.state[name], after.state[name]):
            raise EvidenceError(f"{name}: the value of this input is another than before")


def _same_plain_outputs(before: Program, after: Program) -> None:
    """An output stays a value of the graph, or the same number or None: only values are compared in regions."""
    for index, (old, new) in enumerate(zip(before.output_nodes, after.output_nodes, strict=True)):
        if isinstance(old, fx.Node) != isinstance(new, fx.Node) or (not isinstance(old, fx.Node) and old != new):
            raise EvidenceError(f"output {index}: is {new}, was {old}")


def _fakes(region: Region) -> list[Any]:
    return [node.meta.get("val") for node in region.before[:1]]


def _positive(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs() + 0.5 if tensor.is_floating_point() else tensor


def _has_nan(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and bool(leaf.isnan().any())


def widen(value: Any) -> Any:
    """The value with its floating-point tensors in float64."""

    def one(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(one, value)


def _widen_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return torch.equal(a.to_dense(), b.to_dense())
    if a.is_complex():
        return _bitwise_equal(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    if not a.is_floating_point():
        return torch.equal(a, b)
    same = (a == b) | (a.isnan() & b.isnan())
    # 0.0 == -0.0, but they are not the same number.
    return bool(same.all()) and torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())


def _difference(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    if a.dtype != b.dtype or a.shape != b.shape:
        raise EvidenceError(f"{a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}")
    if not a.is_floating_point():
        return float((a != b).sum().item()), math.inf
    gap = torch.nan_to_num((a.double() - b.double()).abs(), nan=0.0, posinf=math.inf)
    unit = (torch.finfo(a.dtype).eps * a.double().abs()).clamp_min(torch.finfo(a.dtype).tiny)
    return float(gap.max().item()), float(torch.nan_to_num(gap / unit, nan=0.0, posinf=math.inf).max().item())


def _error(found: torch.Tensor, reference: torch.Tensor) -> float:
    if not found.numel():
        return 0.0
    return float(torch.nan_to_num((found.double() - reference).abs(), nan=0.0, posinf=0.0).max().item())
