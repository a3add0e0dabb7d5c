"""Bisection of real pipelines on real models, and every prefix of every pass."""

from __future__ import annotations

import pytest
import torch

import memopt
from memopt.difference.bisect import NothingToFind, bisect
from memopt.difference.bisect_program import NumbersCheck, pipeline, save_program
from memopt.difference.recorded import record_programs
from memopt.difference.transplant import Tangled, cut, transplant
from memopt.pass_manager import Change, Pass, PassResult
from tests import planted


def recorded(name: str, training: bool = False):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = memopt.models.build(name).train(training)
    (found,) = record_programs(model, (), model.example_inputs(2, labels=training), training=training)
    return found


@pytest.mark.quick("names nothing-gpt2:tiny", "names its changes-gpt2:tiny")
@pytest.mark.parametrize("name", ["resnet50:tiny", "gpt2:tiny"])
@pytest.mark.parametrize("passes", [planted.TWELVE, planted.SILENT], ids=["names its changes", "names nothing"])
def test_a_planted_pass_is_found_by_name_and_node(name, passes):
    assert len(passes) == 13
    item = recorded(name)
    found = bisect(item.program, pipeline(passes), NumbersCheck(item.program, item.values))
    assert found.name == "swap_adds" and found.count == 13 and "float64 error" in found.words
    assert found.rewrite is not None and found.rewrite.alone
    assert "sub_tensor" in found.rewrite.after and "aten.sub.Tensor" in found.rewrite.text
    if passes is planted.TWELVE:
        assert found.rewrite.summaries == ("swapped add_3",)
        assert found.rewrite.before == ("add_3",) and found.rewrite.after == ("sub_tensor",)
    assert found.checks < 15


def test_in_a_training_step():
    item = recorded("gpt2:tiny", training=True)
    found = bisect(item.program, pipeline(planted.TRAINED), NumbersCheck(item.program, item.values))
    assert (found.name, found.rewrite.before, found.rewrite.after) == ("swap_adds", ("add_3",), ("sub_tensor",))


@pytest.mark.parametrize(("name", "training"), [("unet:tiny", False), ("bert_base:tiny", True)])
def test_nothing_to_find_in_memopts_own_pipelines(name, training):
    item = recorded(name, training)
    passes = memopt.TRAINING if training else memopt.INFERENCE
    with pytest.raises(NothingToFind):
        bisect(item.program, pipeline(passes), NumbersCheck(item.program, item.values))


@pytest.mark.quick("vit_b_16:tiny-False")
@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("vit_b_16:tiny", False),
        pytest.param("mobilenet_v3_large:tiny", False, marks=pytest.mark.slow),
        ("resnet18:tiny", True),
        pytest.param("llama_tiny:tiny", True, marks=pytest.mark.slow),
        pytest.param("unet:tiny", True, marks=pytest.mark.slow),
        pytest.param("densenet121:tiny", False, marks=pytest.mark.slow),
        pytest.param("bert_base:tiny", False, marks=pytest.mark.slow),
    ],
)
def test_every_prefix_of_every_pass_computes_the_same(name, training):
    item = recorded(name, training)
    check = NumbersCheck(item.program, item.values)
    program, made = item.program, 0
    for step in memopt.TRAINING if training else memopt.INFERENCE:
        result = step.run(program)
        if result.program is not program:
            whole = cut(program, result.program, result.changes)
            for number in range(1, len(whole.parts) + 1):
                try:
                    part = transplant(whole, whole.parts[:number])
                except Tangled:
                    continue
                made += 1
                assert check(part, "").passed, (step.name, number)
        program = result.program
    assert made > 5


class WrongPlace(Pass):
    """Says that a result takes the storage of its operand, which is still read."""

    name = "wrong_place"

    def run(self, program):
        new = program.copy()
        node = next(n for n in new.calls if n.target is torch.ops.aten.relu.default and len(n.args[0].users) > 1)
        node.meta["inplace"] = 0
        return PassResult(new.finish(), (Change(f"{node.name} in place", (node.name,), (node.name,)),))


class WrongWeight(Pass):
    """Changes the value of a constant."""

    name = "wrong_weight"

    def run(self, program):
        name = next(entry.name for entry in program.inputs if entry.kind.value == "constant")
        return PassResult(
            program.copy().finish(state={**program.state, name: program.state[name] + 1}), (Change("moved a constant"),)
        )


def test_annotations_and_values_are_parts_too():
    class Net(torch.nn.Module):
        def forward(self, x):
            y = x * torch.tensor([2.0, 3.0])
            return y.relu() + y

    torch._dynamo.reset()
    (item,) = record_programs(Net().eval(), (torch.randn(4, 2),), {}, training=False)
    check = NumbersCheck(item.program, item.values)
    found = bisect(item.program, pipeline((*memopt.INFERENCE[:3], WrongPlace())), check)
    assert found.name == "wrong_place" and found.rewrite.before == ("relu",)
    found = bisect(item.program, pipeline((WrongWeight(),)), check)
    assert found.name == "wrong_weight" and len(found.rewrite.before) == 1


@pytest.mark.quick("False")
@pytest.mark.parametrize("training", [False, True])
def test_saved_stages_run_as_the_program_does(tmp_path, training):
    item = recorded("resnet18:tiny", training)
    path = tmp_path / "stage.pt2"
    save_program(item.program, item.values, path)
    loaded = torch.export.load(path)
    args, _ = loaded.example_inputs
    given = iter(item.values)
    values = [next(given) for entry in item.program.inputs if entry.kind.value != "constant"]
    expected = [value for value in item.program.run(*values) if value is not None]
    found = [value for value in loaded.module()(*args) if value is not None]
    torch.testing.assert_close(found, expected)


def test_what_a_check_sees():
    item = recorded("resnet18:tiny")
    check = NumbersCheck(item.program, item.values)
    assert check(item.program, "").passed
    broken = item.program.copy()
    relu = next(node for node in broken.calls if node.target is torch.ops.aten.relu.default)
    relu.target = torch.ops.aten.log.default
    assert "NaN or infinity" in check(broken.finish(), "").words
    relu.args = (relu.args[0], 3)
    assert check(broken, "").words.startswith("the program does not run")
