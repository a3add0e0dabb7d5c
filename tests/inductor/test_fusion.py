"""InductorFusion: which values are never stored, what that means for memory and costs, and the numbers of a plan."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from memopt.inductor.fusion import InductorFusion, realize
from memopt.memory.aliasing import analyse
from memopt.memory.cost.table import CostTable
from memopt.memory.timeline import timeline
from memopt.passes.chunk_loss import ChunkLoss
from memopt.step.encode_step import lower
from tests.inductor.test_peak_lower_bound import needs_compiler
from tests.passes.build import capture_joint, trace


def marked(program):
    return InductorFusion(CostTable()).mark(program)


def fused(program):
    return {node.name for node in program.calls if node.meta.get("fused")}


def test_what_only_kernels_read_is_not_stored_and_what_a_library_call_reads_is():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    program = marked(trace(lambda x, w: (torch.mm(torch.relu(x) * 2, w), (x + 1).sum(0)), x, w))
    assert fused(program) == {"relu", "add"}


def test_what_the_caller_gets_is_stored_and_views_of_what_is_not_are_not_either():
    x = torch.randn(8, 8)
    program = marked(trace(lambda x: (x + 1, (x * 2).view(64).t().expand(2, 64).sum(0)), x))
    assert fused(program) == {"mul", "view", "t", "expand"}
    aliasing = analyse(program)
    assert len(aliasing.storages) == 3
    view = next(node for node in program.calls if node.name == "expand")
    assert [aliasing.storages[index].producer.name for index in aliasing.of[view]] == ["x_1"]


def test_a_value_with_several_readers_that_reads_much_is_stored():
    tensors = [torch.randn(8, 8) for _ in range(6)]

    def few(*values):
        total = sum(values[:3])
        return total.sum(0), total.amax(0)

    def many(*values):
        total = sum(values)
        return total.sum(0), total.amax(0)

    def once(*values):
        return (sum(values).sum(0),)

    assert {"add_2"} <= fused(marked(trace(few, *tensors)))
    assert "add_5" not in fused(marked(trace(many, *tensors)))
    assert "add_5" in fused(marked(trace(once, *tensors)))


def much(x):
    """A value that takes more to compute than Inductor computes in each reader."""
    for number in range(20):
        x = x.sin() + number
    return x


@config.patch(realize_opcount_threshold=30)
def test_a_value_that_takes_much_is_in_no_memory_where_one_kernel_reads_it():
    """Inductor makes a buffer of it, and its scheduler one kernel, in which the buffer lives: the loss's gradient."""
    x, w, bias = torch.randn(8, 8), torch.randn(8, 8), torch.randn(64)

    def narrowed(x, w):
        return (torch.mm((much(x) * 2).to(torch.bfloat16), w.to(torch.bfloat16)),)

    program = marked(trace(narrowed, x, w))
    kernels = [node.name for node in program.calls if node.meta.get("kernel")]
    assert len(kernels) == 2, "both operands of the product, and nothing else"
    costs = InductorFusion(CostTable()).costs(program, CostTable().measure_all(program))
    assert [name for name, cost in costs.items() if cost.seconds and name in kernels] == kernels

    def reader(x, w, bias):
        return (much(x).view(64) * bias).sin(), torch.mm(x, w)

    assert "add_19" in fused(marked(trace(reader, x, w, bias)))


@needs_compiler
@config.patch(realize_opcount_threshold=10)
def test_the_code_has_no_buffer_for_what_takes_much():
    def narrowed(x, w):
        product = torch.mm(x, w)
        return torch.mm((much(product) * product).to(torch.bfloat16), w.to(torch.bfloat16))

    x, w = torch.randn(64, 64), torch.randn(64, 64)
    torch._dynamo.reset()
    with torch.no_grad():
        _, (code, *_) = run_and_get_code(torch.compile(narrowed), x, w)
    program = marked(trace(lambda x, w: (narrowed(x, w),), x, w))
    stored = [node for node in program.calls if not node.meta.get("fused")]
    assert code.count(" = empty_strided_cpu((") == len(stored) == 4, "two products, and the operands of the second"


@config.patch(realize_opcount_threshold=30)
def test_a_value_that_takes_much_is_stored_where_several_kernels_read_it():
    x, w = torch.randn(8, 8), torch.randn(8, 8)

    def after_a_call(x, w):
        value = much(x)
        return (value * torch.mm(x, w),)

    def reduced(x, w):
        value = much(x)
        return (value.sum(0),)

    def of_another_size(x, w):
        return (much(x).unsqueeze(0) * torch.mm(x, w).unsqueeze(1).clone(),)

    for function in (after_a_call, reduced, of_another_size):
        program = marked(trace(function, x, w))
        last = [node.name for node in program.calls if node.target is torch.ops.aten.add.Tensor][-1]
        assert last not in fused(program), function.__name__


def test_what_is_written_over_is_computed_where_it_is_written():
    """The gradient of an embedding is added into zeros: they are one tensor."""
    x, rows, ids = torch.randn(8, 4), torch.randn(3, 4), torch.tensor([1, 5, 1])

    def gradient(x, rows, ids):
        zeros = torch.zeros(8, 4)
        added = torch.ops.aten._unsafe_index_put.default(zeros, [ids], rows, True)
        return (added, torch.ops.aten._unsafe_index_put.default(x + 1, [ids], rows, True))

    program = marked(trace(gradient, x, rows, ids))
    assert fused(program) == {"zeros", "add"}
    assert timeline(program).peak_bytes == 2 * x.nbytes

    def twice(x, rows, ids):
        one = x + 1
        return (torch.ops.aten._unsafe_index_put.default(one, [ids], one[:3], True),)

    assert "add" not in fused(marked(trace(twice, x, rows, ids)))


def chunked(dtype, waiting=1):
    x, weight = torch.randn(64, 4, dtype=dtype), torch.randn(40, 4, dtype=dtype)
    labels = torch.randint(0, 40, (64,))
    program = capture_joint(
        lambda x, w, t: F.cross_entropy(F.linear(x, w), t), x.requires_grad_(), weight.requires_grad_(), labels
    )
    return ChunkLoss(4, waiting=waiting).run(program).program


def test_a_running_sum_is_written_over_and_computed_once():
    program = marked(chunked(torch.bfloat16))
    sums = [node for node in program.calls if node.meta.get("inplace") == 0]
    assert len(sums) == 2, "the last one is rounded by the kernel that makes it"
    lowering = lower(program, {})
    of = lowering.aliasing.of
    assert len({of[node] for node in sums}) == 1, "one storage holds them all"
    (storage,) = of[sums[0]]
    assert lowering.aliasing.storages[storage].nbytes == 40 * 4 * 4
    for operation, node in enumerate(lowering.operations):
        if storage in of.get(node, ()):
            assert not lowering.problem.recomputable[operation], node
    assert set(sums) <= set(lowering.operations), "each runs where it stands"


def test_a_running_sum_that_something_else_reads_is_not_written_over():
    program = chunked(torch.bfloat16)
    first = next(node for node in program.calls if node.target is torch.ops.aten.as_strided.default)
    with program.graph.inserting_after(first):
        seen = program.graph.call_function(torch.ops.aten.sum.default, (first,))
    seen.meta.update(phase=first.meta["phase"], val=first.meta["val"].sum())
    assert sum("inplace" in node.meta for node in marked(program).calls) == 1


def test_several_shares_are_added_to_a_running_sum_by_one_kernel():
    add, convert = torch.ops.aten.add.Tensor, torch.ops.prims.convert_element_type.default
    program = marked(chunked(torch.bfloat16, 3))  # three, and one that is left
    shares = [n for n in program.calls if n.target in (add, convert) and n.meta["val"].shape == (40, 4)]
    made = [node for node in shares if not node.meta.get("fused")]
    assert [node.meta["val"].dtype for node in made] == [torch.float32, torch.bfloat16]
    program = marked(chunked(torch.bfloat16, 2))
    assert [node.meta.get("inplace") for node in program.calls if "inplace" in node.meta] == []
    program = marked(chunked(torch.bfloat16, 4))  # all four
    (gradient,) = [
        n for n in program.calls
        if n.target in (add, convert) and n.meta["val"].shape == (40, 4) and not n.meta.get("fused")
    ]  # fmt: skip
    assert gradient.meta["val"].dtype is torch.bfloat16


def test_a_value_that_reads_what_the_program_overwrites_is_stored():
    x, state = torch.randn(8), torch.zeros(8)
    function = lambda x, state: (state * 0.9 + x, ((state - x) * 2).sum())  # noqa: E731
    program = marked(trace(function, x, state, mutated={0: 1}))
    assert fused(program) == {"mul_1"}, "computed later, `state - x` would see the new state"


def stored(program):
    return {node.name for node in program.calls if node.meta.get("stored")}


def test_a_mask_drawn_from_a_seed_is_stored_and_drawing_it_again_costs_more_than_to_move_it():
    draw = torch.ops.prims.inductor_random.default
    seeds = torch.ops.prims.inductor_lookup_seed.default

    def dropout(x, all_seeds):
        mask = draw([256, 256], seeds(all_seeds, 0), "rand").to(torch.float16) > 0.1
        return ((mask * x).sum(0),)

    x, table = torch.randn(256, 256), CostTable()
    fusion = InductorFusion(table)
    program = fusion.mark(trace(dropout, x, torch.zeros(1, dtype=torch.int64)))
    names = {node.target: node.name for node in program.calls}
    assert {names[draw], names[torch.ops.aten.mul.Tensor]} <= fused(program)
    mask = names[torch.ops.aten.gt.Scalar]
    assert mask not in fused(program)
    node = next(node for node in program.calls if node.name == mask)
    drawing = fusion.costs(program, table.measure_all(program))[mask].seconds
    assert drawing >= 256 * 256 * 320 / table.device(node).flops["float32"]


def test_a_sum_of_branches_is_stored_where_a_kernel_after_a_library_call_reads_it():
    x, y, z, w = (torch.randn(1024, 512) for _ in range(4))

    def later(x, y, z, w):
        total = x + y + z
        return (total @ w.t()).sum() + total.sum()

    def at_once(x, y, z, w):
        total = x + y + z
        return total.sum(), total.amax(), (x @ w.t()).sum()

    def little(x, y, z, w):
        total = x * 2
        return total.sum() + ((x @ w.t()).sum() * total).sum()

    assert not stored(marked(trace(lambda *v: (later(*v),), x, y, z, w))), "the product reads it: it is stored anyway"
    program = marked(trace(lambda x, y, z, w: (((x + y + z) * (x @ w.t()).sum()).sum(),), x, y, z, w))
    assert stored(program) == {"add_1"}
    assert not stored(marked(trace(lambda *v: at_once(*v), x, y, z, w)))
    assert not stored(marked(trace(lambda *v: (little(*v),), x, y, z, w)))


def test_what_a_rectifier_lets_through_of_a_sum_is_stored_in_place_of_the_sum_and_its_mask():
    x, y, z, w = (torch.randn(1024, 512) for _ in range(4))

    def residual(x, y, z, w):
        passed = torch.where(z <= 0, 0.0, x + y)
        return (passed.sum(), (passed * (z @ w.t()).sum()).sum())

    def shared(x, y, z, w):
        total = x + y
        passed = torch.where(z <= 0, 0.0, total)
        product = (z @ w.t()).sum()
        return (passed.sum() + total.sum(), (passed * product).sum(), (total * product).sum())

    assert stored(marked(trace(residual, x, y, z, w))) == {"where"}
    assert "add" in stored(marked(trace(shared, x, y, z, w))), "the sum is read by itself as well"


def test_a_number_for_each_row_is_stored_where_a_kernel_after_a_library_call_reads_it():
    x, w = torch.randn(64, 512), torch.randn(512, 512)

    def scaled(x, w):
        scale = x.sum(1, keepdim=True).rsqrt()
        return ((x @ w) * scale * 2).sum(), scale.sum()

    program = marked(trace(scaled, x, w))
    assert stored(program) == {"rsqrt"}


def test_a_number_for_each_row_is_stored_where_the_other_phase_reads_it():
    """The labels of a loss, say, shifted by one: a kernel would look them up for each class."""

    def loss(x, weights):
        shifted = F.pad(weights, (0, 1))[..., 1:]
        return (x * shifted.unsqueeze(-1)).square().sum()

    program = marked(capture_joint(loss, torch.randn(64, 512, requires_grad=True), torch.randn(64)))
    assert stored(program) == {"constant_pad_nd"}


def test_what_is_computed_of_nothing_in_memory_is_computed_again_after_a_library_call():
    x, w = torch.randn(64, 512), torch.randn(512, 512)

    def masked(x, w):
        valid = torch.arange(512) < 500
        return ((torch.where(valid, x, 0.0) @ w) * valid).sum(), torch.where(valid, x, 1.0).sum()

    program = marked(trace(masked, x, w))
    assert not stored(program) and "lt" in fused(program)


def test_inductor_is_asked_to_store_what_is_stored():
    x, y, z, w = (torch.randn(1024, 512) for _ in range(4))
    module = marked(trace(lambda x, y, z, w: (((x + y + z) * (x @ w.t()).sum()).sum(),), x, y, z, w)).graph_module
    realize(module)
    asked = [node.name for node in module.graph.nodes if node.meta.get("inductor_realize_to_strides")]
    assert asked == ["add_1"]


def test_random_numbers_are_drawn_once():
    x = torch.randn(8, 8)
    program = marked(trace(lambda x: ((torch.rand_like(x) + x).sum(0),), x))
    assert "rand_like" not in fused(program) and "add" in fused(program)


def test_concatenations_on_cpu_copy_operands_that_are_in_memory():
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    assert fused(marked(trace(lambda x, y: (torch.cat([x + 1, y * 2]).sum(0),), x, y))) == set()


def test_marks_of_an_earlier_call_are_forgotten():
    x = torch.randn(8, 8)
    program = trace(lambda x: (x.relu(), x.exp().sum(0)), x)
    for node in program.calls:
        node.meta["fused"] = True
    assert "relu" not in fused(marked(program))


def test_fused_values_cost_nothing_and_their_reader_pays_for_what_they_read():
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    table = CostTable()
    program = trace(lambda x, y: ((x.relu() + y).sum(0), x.sum(0)), x, y)
    fusion = InductorFusion(table)
    program = fusion.mark(program)
    plain = table.measure_all(program)
    costs = fusion.costs(program, plain)
    assert costs["relu"].seconds == costs["add"].seconds == 0.0
    assert costs["sum_1"].seconds > costs["sum_2"].seconds, "two operands are read in place of one"


def test_what_inductor_generates_a_kernel_for_is_not_priced_as_it_runs_by_itself():
    """A table that is added to takes as long as to move it: a library would sort the rows first."""
    table, ids, rows = torch.randn(300, 64), torch.randint(0, 300, (500,)), torch.randn(500, 64)

    def function(table, ids, rows):
        put = torch.ops.aten.index_put.default(table, [ids], rows, True)
        return put, torch.ops.aten.index_put.default(table.long(), [ids], rows.long(), True), table @ table.t()

    program = InductorFusion(CostTable()).mark(trace(function, table, ids, rows))
    plain = {name: dataclasses.replace(cost, seconds=1.0) for name, cost in CostTable().measure_all(program).items()}
    costs = InductorFusion(CostTable()).costs(program, plain)
    (put, other), (product,) = (
        [node.name for node in program.calls if node.target is target]
        for target in (torch.ops.aten.index_put.default, torch.ops.aten.mm.default)
    )
    assert 0 < costs[put].seconds < 1e-3
    assert costs[other].seconds == costs[product].seconds == 1.0, "of integers there is no such kernel"
