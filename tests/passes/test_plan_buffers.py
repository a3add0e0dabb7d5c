"""Plans of one arena: sharing, joins with every refusal, results apart, and the judge's refusals."""

import dataclasses

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher

import memopt
from memopt.backends.static import StaticBackend
from memopt.memory.buffers import Block, BufferPlan, Home, Placement, PlacementError
from memopt.passes.inplace import Inplace
from memopt.passes.plan_buffers import Form, plan_buffers
from memopt.program import InputKind
from tests.passes.build import capture_joint, trace
from tests.support import capture

x = torch.randn(4, 16, 8, 8)
ROW = 4 * 16 * 8 * 8 * 4


def plan_of(function, *tensors, forms=None, inplace=False, **options):
    program = trace(function, *(tensors or (x,)))
    if inplace:
        program = Inplace().run(program).program
    return plan_buffers(program, forms, **options)


def block_of(plan, name):
    (place,) = plan.values[name]
    return plan.blocks[place.block]


def test_a_chain_takes_turns_in_two_places():
    plan = plan_of(lambda x: (x.exp().sin().cos().tan(),))
    assert plan.arena_bytes == plan.lower_bound == 2 * ROW
    assert plan.total_bytes == 4 * ROW and plan.output_bytes == ROW and plan.operator_bytes == 0
    assert block_of(plan, "exp").offset == block_of(plan, "cos").offset != block_of(plan, "sin").offset


def test_in_place_results_share():
    plan = plan_of(lambda x: (x.exp().sin().cos().sum(),), inplace=True)
    assert plan.arena_bytes == ROW
    assert block_of(plan, "exp") is block_of(plan, "cos")


def test_views_keep_their_base_in_use():
    plan = plan_of(lambda x: (x.exp().view(-1)[:8].sin().sum() + x.cos().sum(),))
    assert block_of(plan, "exp").end > plan.steps.index("sin")
    assert "view" not in plan.values and "slice_1" not in plan.values


def test_what_the_caller_gets_is_not_in_the_arena():
    def function(x):
        a = x.exp()
        return a[0], a.sin(), x.view(-1)

    plan = plan_of(function)
    assert {block.name: block.home for block in plan.blocks} == {"exp": Home.OUTPUT, "sin": Home.OUTPUT}
    assert plan.arena_bytes == 0 and plan.output_bytes == 2 * ROW


def test_operators_that_cannot_write_where_they_are_told_allocate():
    plan = plan_of(lambda x: (x.exp().sin().sum(),), forms={"exp": Form(into=False), "sin": Form(scratch=100)})
    homes = {(block.name, block.scratch): block.home for block in plan.blocks}
    assert homes[("exp", False)] is Home.OPERATOR and homes[("sin", True)] is Home.ARENA
    assert plan.operator_bytes == ROW and plan.values["exp"] == (None,)
    assert plan.arena_bytes == ROW + 128  # scratch is rounded up


def test_wishes_are_met_where_the_arena_does_not_grow():
    def function(x):
        return (x.exp().sum().sin() + x.repeat(3, 1, 1, 1).sum(),)

    forms = {"sin": Form(scratch=64, wish=100 * ROW), "repeat": Form(scratch=64, wish=ROW)}
    plan = plan_of(function, forms=forms)
    assert plan.arena_bytes == plan_of(function, forms={"repeat": Form(scratch=64)}).arena_bytes == 3 * ROW + 128
    sizes = {block.name: block.nbytes for block in plan.blocks if block.scratch}
    assert sizes["repeat"] == 64 and 2 * ROW < sizes["sin"] <= 3 * ROW


def test_a_concatenation_is_written_by_its_producers():
    plan = plan_of(lambda x: (torch.cat((x.exp(), x.sin()), 1).sum(),))
    assert plan.joins == {"cat": (True, True)}
    (place,) = plan.values["sin"]
    assert place.offset == 16 * 64 * 4 and place.strides == (32 * 64, 64, 8, 1) and place.shape == tuple(x.shape)
    assert plan.arena_bytes == 2 * ROW
    assert plan_of(lambda x: (torch.cat((x.exp(), x.sin()), 1).sum(),), joins=False).arena_bytes == 4 * ROW


def test_an_earlier_concatenation_is_a_part_of_a_later_one():
    def function(x):
        a, b = x.exp(), x.sin()
        two = torch.cat((a, b), 1)
        c = two.sum(1, keepdim=True)
        three = torch.cat((a, b, c), 1)
        return (three.sum(),)

    plan = plan_of(function)
    assert plan.joins == {"cat": (True, True), "cat_1": (True, True, True)}
    assert len({block_of(plan, name).name for name in ("exp", "sin", "cat", "cat_1")}) == 1


def test_a_concatenation_that_is_returned_is_written_in_place_too():
    plan = plan_of(lambda x: (torch.cat((x.exp(), x.sin())),))
    assert plan.joins == {"cat": (True, True)} and plan.arena_bytes == 0


@pytest.mark.parametrize(
    ("function", "joined"),
    [
        (lambda x: (torch.cat((x, x.exp())).sum(),), (False, True)),  # an input
        (lambda x: ((a := x.exp()), torch.cat((a, x.sin())).sum()), (False, True)),  # returned as well
        (lambda x: (torch.cat((x.exp()[:2], x.sin())).sum(),), (False, True)),  # part of its storage
        (lambda x: (torch.cat((x.exp().transpose(2, 3), x.sin())).sum(),), (False, True)),  # in another order
        (lambda x: (torch.cat(((x > 0), x.sin())).sum(),), (False, True)),  # another dtype
        (lambda x: (torch.cat(((a := x.exp()), a)).sum(),), (True, False)),  # twice
    ],
)
def test_parts_that_cannot_be_slices_are_copied(function, joined):
    assert plan_of(function).joins == {"cat": joined}


def test_a_part_that_is_written_over_after_the_concatenation_is_copied():
    def function(x):
        a = x.exp()
        c = torch.cat((a, x.sin()), 1)
        return (a.neg().sum() + c.sum(),)

    assert plan_of(function).joins == {"cat": (True, True)}
    assert plan_of(function, inplace=True).joins == {"cat": (False, True)}


def test_a_part_that_is_read_after_the_concatenation_was_written_over_is_copied():
    def function(x):
        a = x.exp()
        c = torch.cat((a, x.sin()), 1).neg()
        return (c.sum() + a.sum(),)

    assert plan_of(function).joins == {"cat": (True, True)}
    assert plan_of(function, inplace=True).joins == {"cat": (False, True)}


def test_operators_that_want_whole_tensors_get_them():
    def function(x, dim):
        return (torch.cat((x.exp(), x.sin()), dim).sum(),)

    whole = {"exp": Form(slices=False)}
    assert plan_of(lambda x: function(x, 1), forms=whole).joins == {"cat": (False, True)}
    assert plan_of(lambda x: function(x, 0), forms=whole).joins == {"cat": (True, True)}  # a slice without gaps
    assert plan_of(lambda x: function(x, 1), torch.randn(1, 4, 8, 8), forms=whole).joins == {"cat": (True, True)}


def test_views_that_a_slice_does_not_have_prevent_a_join():
    def function(x):
        a = x.exp()
        return (torch.cat((a, x.sin()), 1).sum() + a.view(-1).sum(),)

    assert plan_of(function).joins == {"cat": (False, True)}
    assert plan_of(function, torch.randn(1, 4, 8, 8)).joins == {"cat": (True, True)}
    with enable_python_dispatcher():  # as within torch.compile, where torch refuses such a view by another error
        assert plan_of(function).joins == {"cat": (False, True)}


def test_a_view_that_counts_entries_of_memory_prevents_a_join():
    def function(x):
        a = x.exp()
        return (torch.cat((a, x.sin()), 1).sum(), a.as_strided(a.shape, a.stride()).cos())

    assert plan_of(function).joins == {"cat": (False, True)}
    program = trace(function, x)
    torch.testing.assert_close(list(StaticBackend().bind(program)([x])), list(program.run(x)))


def test_joins_that_take_more_memory_are_not_made():
    # The small part comes early, and the large result would wait for it through the large values in between.
    def function(x):
        small = x.sum(1, keepdim=True)
        wide = x.repeat(1, 40, 1, 1).exp().sum(1, keepdim=True)
        return (torch.cat((small, wide + x.repeat(1, 30, 1, 1)), 1).sum(),)

    with_joins, without = plan_of(function), plan_of(function, joins=False)
    assert with_joins.lower_bound <= without.lower_bound
    assert with_joins.joins["cat"][0] is False


@pytest.mark.parametrize("batch", [1, 3])
def test_densenet_copies_nothing(batch):
    model = memopt.models.build("densenet121:tiny").eval()
    program = capture(model, **model.example_inputs(batch))
    plan = plan_buffers(program)
    cats = [node for node in program.calls if node.target is torch.ops.aten.cat.default]
    assert cats and all(all(plan.joins[node.name]) for node in cats)


def test_training_programs_are_refused():
    program = capture_joint(lambda x, w: (x @ w).sum(), torch.randn(4, 4), torch.randn(4, 4, requires_grad=True))
    with pytest.raises(ValueError, match="training"):
        plan_buffers(program)


def test_it_prints():
    text = str(plan_of(lambda x: (torch.cat((x.exp(), x.sin()), 1).cos(),), forms={"cos": Form(scratch=64)}))
    assert "exp, sin" in text or "cat, exp, sin" in text
    assert "scratch of cos" in text and "output" in text and "the least" in text


def test_weights_are_not_placed():
    plan = plan_buffers(trace(lambda x, w: ((x * w).sum(),), x, torch.randn(8), kinds={1: InputKind.PARAMETER}))
    assert [block.name for block in plan.blocks] == ["mul", "sum_1"]


def hand(**changes):
    blocks = (Block("a", Home.ARENA, 64, 0, 2, 0), Block("b", Home.ARENA, 64, 1, 3, 64))
    values = {"a": (Placement(0, 0, (16,), (1,), 4),), "b": (Placement(1, 0, (4, 4), (4, 1), 4),), "c": ()}
    plan = BufferPlan(("a", "b", "c"), blocks, values, ((), (0,), (1,)), {}, {}, 128, 128, 64)
    return dataclasses.replace(plan, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arena_bytes": 127}, "b lies at 64..128, outside of 127"),
        (
            {"blocks": (hand().blocks[0], dataclasses.replace(hand().blocks[1], offset=32))},
            "32, no multiple of 64|share",
        ),
        (
            {"blocks": (hand().blocks[0], dataclasses.replace(hand().blocks[1], offset=0))},
            "a and b share bytes at step 1",
        ),
        ({"values": {"a": (Placement(0, 4, (16,), (1,), 4),)}}, "a reaches outside"),
        ({"reads": ((), (0,), (0,))}, "c reads the block of a out of its time"),
    ],
)
def test_the_judge_refuses(changes, message):
    hand().check()
    with pytest.raises(PlacementError, match=message):
        hand(**changes).check()
