"""SumLookups: the same bits without a table in float32, tied weights and padding included, and what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.decomposition import select_decomp_table

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.memory.timeline import timeline
from memopt.passes.sum_lookups import SumLookups
from tests.end_to_end import gradients, resident_bytes, restorer, step
from tests.passes.build import capture_joint, check, reasons
from tests.support import apply

aten = torch.ops.aten
ROWS, WIDTH = 300, 8
HALVES = (torch.bfloat16, torch.float16)


def data(dtype=torch.bfloat16, shape=(2, 12), most=9):
    """A table, indices with many equal ones, and what the rows are multiplied by."""
    torch.manual_seed(0)
    table = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    return table, torch.randint(0, most, shape), torch.randn(*shape, WIDTH).to(dtype)


def captured(function, *tensors):
    return capture_joint(function, *tensors, decompositions=select_decomp_table())


def sizes(program):
    """Dtypes of what is as large as the table, in order."""
    values = [node.meta["val"] for node in program.calls]
    return [v.dtype for v in values if isinstance(v, torch.Tensor) and v.numel() >= ROWS * WIDTH]


def plain(table, ids, by):
    return (F.embedding(ids, table) * by).float().square().sum()


def padded(table, ids, by):
    return (F.embedding(ids, table, padding_idx=3) * by).float().square().sum()


def scaled(table, ids, by):
    return (F.embedding(ids, table, scale_grad_by_freq=True) * by).float().square().sum()


def tied(table, ids, by):
    return ((F.embedding(ids, table) * by).flatten(0, -2) @ table.t()).float().square().sum()


def twice(table, ids, by):
    return (F.embedding(ids, table) * by + F.embedding(ids // 2, table)).float().square().sum()


@pytest.mark.quick("plain-*(12,)", "padded-*(2, 12)", "scaled-*(2, 3, 2)")
@pytest.mark.parametrize("shape", [(12,), (2, 12), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("function", [plain, padded, scaled], ids=lambda f: f.__name__)
def test_rows_that_are_rounded_are_written_into_zeros(function, dtype, shape):
    tensors = data(dtype, shape)
    program = captured(function, *tensors)
    assert torch.float32 in sizes(program)
    result = check(SumLookups(), program, *tensors)
    (change,) = result.changes
    assert change.summary.endswith(f"of {tensors[1].numel()} lookups in {ROWS} rows")
    puts = [node.meta["val"].shape for node in result.program.calls if "index_put" in str(node.target)]
    assert (tensors[1].numel(), WIDTH) in puts, "rows of as many as there are lookups"
    assert sizes(result.program) == [dtype] * 2, "the zeros, and the gradient"
    assert not result.refusals


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_rows_are_added_to_the_gradient_of_tied_weights(dtype):
    tensors = data(dtype)
    program = captured(tied, *tensors)
    result = check(SumLookups(), program, *tensors)
    assert len(result.changes) == 1 and not result.refusals
    (gradient,) = [value for value in result.program.output_nodes[1:] if value is not None]
    base = gradient.args[0]
    assert gradient.target is aten.index_put.default and base.target is not aten.full.default
    before, after = (timeline(each).live_bytes[-8:] for each in (program, result.program))
    assert max(after) < max(before), "at the end of backward"


def test_what_is_not_looked_up_keeps_its_zeros_sign():
    table, ids, by = data()

    def function(table, ids, by):
        return plain(table, ids, by) + (table * -0.0).float().sum()

    program = captured(function, table, ids, by)
    result = apply(SumLookups(), program)
    assert len(result.changes) == 1
    (before, after) = (
        [v for v in p.run(table.detach(), ids, by, torch.ones(())) if v is not None] for p in (program, result.program)
    )
    assert torch.equal(before[1], after[1])
    assert not before[1][ROWS - 1].signbit().any() and after[1][ROWS - 1].signbit().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_several_lookups_of_one_table(dtype):
    tensors = data(dtype)
    result = check(SumLookups(), captured(twice, *tensors), *tensors)
    assert len(result.changes) == 2 and torch.float32 not in sizes(result.program)


def thrice(table, ids, by):
    return (twice(table, ids, by) + F.embedding(ids // 3, table).float().square().sum()) / 2


def tied_twice(table, ids, by):
    return tied(table, ids, by) + (F.embedding(ids // 2, table) * by).float().square().sum()


@pytest.mark.parametrize("function", [thrice, tied_twice], ids=lambda f: f.__name__)
def test_a_sum_that_is_added_to_a_sum(function):
    tensors = data()
    result = check(SumLookups(), captured(function, *tensors), *tensors)
    assert len(result.changes) >= 2


@pytest.mark.parametrize("form", [aten._unsafe_index_put.default, aten.index_put.default], ids=str)
def test_sums_that_are_not_masked(form):
    tensors = data()
    table = dict(select_decomp_table())

    def backward(gradient, indices, rows, padding, scale):
        zeros = gradient.new_zeros((rows, gradient.shape[-1]), dtype=torch.float32)
        return form(zeros, [indices], gradient.float(), True).to(gradient.dtype)

    table[aten.embedding_dense_backward.default] = backward
    result = check(SumLookups(), capture_joint(plain, *tensors, decompositions=table), *tensors)
    assert len(result.changes) == 1 and torch.float32 not in sizes(result.program)


def test_indices_from_the_end_and_out_of_range():
    table, ids, by = data(torch.float32)

    def function(table, ids, by):
        return ((table[ids] * by).flatten(0, -2) @ table.t()).square().sum()

    program = captured(function, table, ids, by)
    result = check(SumLookups(), program, table, ids - 4, by)
    assert len(result.changes) == 1
    with pytest.raises(IndexError):
        result.program.run(table.detach(), ids + ROWS, by, torch.ones(()))


def test_what_is_masked_may_be_out_of_range():
    tensors = data()

    def backward(gradient, indices, rows, padding, scale):
        zeros = gradient.new_zeros((rows, gradient.shape[-1]), dtype=torch.float32)
        mask = ((indices >= 0) & (indices < rows) & (indices != padding)).unsqueeze(-1)
        put = aten._unsafe_masked_index_put_accumulate.default
        return put(zeros, mask, [indices], gradient.float()).to(gradient.dtype)

    # Not torch's own of whatever version: 2.11 fills what is masked with zeros, and checks its indices.
    table = {**select_decomp_table(), aten.embedding_dense_backward.default: backward}
    program = capture_joint(plain, *tensors, decompositions=table)
    after = apply(SumLookups(), program).program
    inputs = [tensors[0].detach(), tensors[1], tensors[2], torch.ones(())]
    for each in (program, after):  # forward looks up row 0 instead
        (lookup,) = [node for node in each.calls if node.target is aten.embedding.default]
        with each.graph.inserting_before(lookup):
            index = each.graph.call_function(aten.clamp.default, (lookup.args[1], 0, ROWS - 1))
        index.meta = dict(lookup.args[1].meta, phase=lookup.meta["phase"])
        lookup.replace_input_with(lookup.args[1], index)
        each.graph_module.recompile()
    inputs[1] = inputs[1].clone()
    inputs[1][0, :2] = torch.tensor([-1, ROWS + 5])
    before, found = (each.run(*inputs)[1] for each in (program, after))
    assert torch.equal(before, found)


def refused(function, *tensors):
    program = captured(function, *tensors)
    result = apply(SumLookups(), program)
    assert result.program is program
    (reason,) = reasons(result).values()
    return reason


def test_a_gradient_in_the_precision_of_the_sum():
    assert refused(plain, *data(torch.float32)).startswith("its sum in float32 is what is read")


def test_as_many_lookups_as_rows():
    reason = refused(plain, *data(shape=(ROWS,)))
    assert reason == "rows of its 300 lookups would take 16800 bytes and save 7200"


def test_a_sum_that_is_read_in_float32_too():
    table = dict(select_decomp_table())

    def backward(gradient, indices, rows, padding, scale):
        zeros = gradient.new_zeros((rows, gradient.shape[-1]), dtype=torch.float32)
        total = aten._unsafe_index_put(zeros, [indices], gradient.float(), True)
        return (total * 2).to(gradient.dtype) - total.to(gradient.dtype)

    table[aten.embedding_dense_backward.default] = backward
    program = capture_joint(plain, *data(), decompositions=table)
    result = apply(SumLookups(), program)
    assert result.program is program
    assert list(reasons(result).values()) == ["its sum is read by more than one operation"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gradient_of_another_layout_is_added_as_before(dtype):
    """Rounded rows are written into zeros then; in float32 there is nothing to win."""
    table, ids, by = data(dtype)

    def function(table, ids, by):
        x = (F.embedding(ids, table) * by).flatten(0, -2)
        return (x @ table.t()).float().square().sum()

    program = captured(function, table, ids, by).copy()
    (added,) = [node for node in program.calls if node.target is aten.add.Tensor]
    (other,) = [node for node in added.all_input_nodes if "index_put" not in node.name and "convert" not in node.name]
    with program.graph.inserting_before(added):
        turned = program.graph.call_function(aten.clone.default, (other,), {"memory_format": torch.contiguous_format})
        wide = program.graph.call_function(aten.expand.default, (turned, [ROWS, WIDTH]))
        one = program.graph.call_function(aten.sum.dim_IntList, (wide, [0], True))
        spread = program.graph.call_function(aten.expand.default, (one, [ROWS, WIDTH]))
    for node in (turned, wide, one, spread):
        node.meta = {"phase": added.meta["phase"]}
    added.replace_input_with(other, spread)
    program = program.finish()
    result = check(SumLookups(), program, table, ids, by)
    assert len(result.changes) == (dtype is torch.bfloat16)
    assert any(
        node.target is aten.add.Tensor and node.meta["val"].shape == (ROWS, WIDTH) for node in result.program.calls
    )


def test_what_is_no_sum_of_lookups_is_left_alone():
    def function(table, ids, by):
        mask = by > 0
        grown = torch.index_put(by * 2, [ids.flatten()[:2] % 2], by[:2], accumulate=True)
        return (torch.where(mask, by, grown) * table.sum()).float().sum()

    tensors = data()
    program = captured(function, *tensors)
    result = apply(SumLookups(), program)
    assert result.program is program and not result.refusals


class Language(nn.Module):
    """Tokens and positions, layers, and logits of the vocabulary, by the same table where tied."""

    def __init__(self, tied, vocabulary=3000, width=16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.logits = nn.Linear(width, vocabulary if tied else 10, bias=False)
        if tied:
            self.logits.weight = self.tokens.weight

    def forward(self, ids, labels):
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.logits(x).flatten(0, -2).float(), labels.flatten())


class Indexed(nn.Module):
    """A tied table whose rows are taken by indexing it."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids, labels):
        x = self.table[ids]
        x = x + self.layer(x)
        return F.cross_entropy((x @ self.table.t()).flatten(0, 1), labels.flatten())


def language(tied):
    torch.manual_seed(0)
    model = Language(tied).to(torch.bfloat16)
    with torch.no_grad():
        model.tokens.weight.mul_(0.05)  # then its gradient is larger than that of the logits' layer
    return model, {"ids": torch.randint(0, 20, (4, 16)), "labels": torch.randint(0, 10, (4, 16))}


def stepped(model, inputs, run):
    restore = restorer(model)
    step(run, inputs)
    found = gradients(model)
    restore()
    return found


def distance(found, true):
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, true, strict=True))


WITHOUT = tuple(item for item in memopt.TRAINING if item.name != "sum_lookups")


@pytest.mark.quick("tied-aten", "apart-aten")
@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_step(backend, tied):
    if backend == "inductor" and missing_compiler(torch.device("cpu")) is not None:
        pytest.skip("Inductor needs a C++ compiler")
    model, inputs = language(tied)
    exact = copy.deepcopy(model).double()
    true, eager = stepped(exact, inputs, exact), stepped(model, inputs, model)
    peaks = []
    for passes in (memopt.TRAINING, WITHOUT):
        torch._dynamo.reset()
        compiled = memopt.compile(model, backend=backend, passes=passes)
        found = stepped(model, inputs, compiled)
        assert all(torch.isfinite(value).all() for value in found)
        assert distance(found, true) <= 1.5 * distance(eager, true)
        taken = {record.name: len(record.changes) for record in compiled.report.passes}
        assert taken.get("sum_lookups", 0) == (passes is memopt.TRAINING and backend == "inductor")
        peaks.append(compiled.report.peak_bytes)
    if backend == "inductor" and not tied:  # tied, logits are as wide as the table is long
        assert peaks[0] < 0.75 * peaks[1]


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_step_on_a_gpu(tied):
    model, inputs = language(tied)
    exact = copy.deepcopy(model).double()
    true, eager = stepped(exact, inputs, exact), stepped(model, inputs, model)
    model, inputs = model.cuda(), {name: value.cuda() for name, value in inputs.items()}
    torch._dynamo.reset()
    compiled = memopt.compile(model, backend="inductor")
    found = [value.cpu() for value in stepped(model, inputs, compiled)]
    assert distance(found, true) <= 2 * distance(eager, true)
    assert any(record.changes for record in compiled.report.passes if record.name == "sum_lookups")


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_step_with_a_table_that_is_indexed(backend):
    if backend == "inductor" and missing_compiler(torch.device("cpu")) is not None:
        pytest.skip("Inductor needs a C++ compiler")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = Indexed(), {"ids": torch.randint(-9, 9, (2, 12)), "labels": torch.randint(0, ROWS, (2, 12))}
    expected = stepped(model, inputs, model)
    compiled = memopt.compile(model, backend=backend)
    found = stepped(model, inputs, compiled)
    (record,) = [record for record in compiled.report.passes if record.name == "sum_lookups"]
    assert len(record.changes) == 1 and record.evidence.max_ulp == 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="Inductor needs a C++ compiler")
def test_the_least_budget_falls_and_is_kept():
    model, inputs = language(tied=False)
    resident = resident_bytes(model, inputs)
    least = []
    for passes in (memopt.TRAINING, WITHOUT):
        torch._dynamo.reset()
        with pytest.raises(memopt.BudgetError) as error:
            memopt.compile(model, resident, backend="inductor", passes=passes)._memopt.plan((), inputs)
        least.append(error.value.minimum_bytes)
    table = model.tokens.weight.numel() * 4
    assert least[0] <= least[1] - 0.8 * table
    exact = copy.deepcopy(model).double()
    true, eager = stepped(exact, inputs, exact), stepped(model, inputs, model)
    torch._dynamo.reset()
    compiled = memopt.compile(model, int(least[0] * 1.02), backend="inductor")
    found = stepped(model, inputs, compiled)
    assert not compiled.report.notes and compiled.report.peak_bytes <= compiled.report.budget_bytes
    assert distance(found, true) <= 1.5 * distance(eager, true)
    restore = restorer(model)
    assert resident + memopt.measure(step, compiled, inputs).peak_bytes <= compiled.report.budget_bytes
    restore()
