"""PassManager: records in order, refusals kept, and every pass that does wrong named in the error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from memopt.graph.rewrite import Refused
from memopt.pass_manager import Change, Pass, PassError, PassManager, PassResult, Refusal, attempt_each
from memopt.program import InputKind, Program, ProgramError
from tests.passes.build import trace

aten = torch.ops.aten
X = torch.linspace(-2, 2, 12).reshape(3, 4)


class Rewrite(Pass):
    """Applies a function to the program; what the function returns is the result."""

    def __init__(self, name: str, function: Callable[[Program], object], tolerance: float = 0.0) -> None:
        self.name, self.tolerance, self.function = name, tolerance, function  # type: ignore[misc]

    def run(self, program: Program) -> PassResult:
        found = self.function(program)
        return PassResult(found, (Change("rewritten"),)) if isinstance(found, Program) else found


def simple() -> Program:
    return trace(lambda x, w: (x.relu() * w,), X, torch.ones(4), kinds={1: InputKind.PARAMETER})


def edited(program: Program, edit: Callable[[Program], object]) -> Program:
    copy = program.copy()
    edit(copy)
    return copy.finish()


def retarget(program: Program, operator: object) -> None:
    program.calls[0].target, program.calls[0].args = operator, (program.placeholders[0],)


def relu_as_clamp(program: Program) -> Program:
    def edit(copy: Program) -> None:
        copy.calls[0].target, copy.calls[0].args = aten.clamp_min.default, (copy.placeholders[0], 0)

    return edited(program, edit)


def error_of(function: Callable[[Program], object], **options: object) -> str:
    manager = PassManager([Rewrite("first", relu_as_clamp), Rewrite("wrong", function)], **options)
    with pytest.raises(PassError) as caught:
        manager.run(simple())
    assert caught.value.pass_name == "wrong"
    return str(caught.value)


# -- what is recorded -----------------------------------------------------------------------------------------------


def test_each_pass_gets_what_the_one_before_returned_and_leaves_a_record() -> None:
    seen: list[Program] = []

    def clamp(program: Program) -> PassResult:
        seen.append(program)
        new = relu_as_clamp(program)
        return PassResult(new, (Change("relu is clamp", ("relu",), ("relu",)),), (Refusal("mul", "not this one"),))

    def split(program: Program) -> Program:
        seen.append(program)

        def edit(copy: Program) -> None:
            with copy.graph.inserting_before(copy.calls[0]):
                copy.calls[0].update_arg(0, copy.graph.call_function(aten.clone.default, (copy.placeholders[0],)))

        return edited(program, edit)

    def nothing(program: Program) -> PassResult:
        seen.append(program)
        return PassResult(program, (), (Refusal("mul", "nor this one"),))

    program = simple()
    before = str(program.graph)
    manager = PassManager([Rewrite("clamp", clamp), Rewrite("split", split), Rewrite("nothing", nothing)])
    result, records = manager.run(program)
    assert seen[0] is program and seen[2] is result and str(program.graph) == before
    assert [(r.name, r.nodes_before, r.nodes_after) for r in records] == [
        ("clamp", 2, 2),
        ("split", 2, 3),
        ("nothing", 3, 3),
    ]
    assert records[0].changes == (Change("relu is clamp", ("relu",), ("relu",)),)
    assert [record.refusals for record in records] == [
        (Refusal("mul", "not this one"),),
        (),
        (Refusal("mul", "nor this one"),),
    ]
    assert [record.evidence is None for record in records] == [False, False, True]
    assert records[0].evidence.scope == "regions" and records[0].evidence.proved == 1
    assert all(record.seconds >= 0 for record in records)
    assert torch.equal(result.run(X, torch.ones(4))[0], X.relu())


def test_verification_is_full_or_off_on_request() -> None:
    for verify, scope in ((True, "regions"), ("full", "program")):
        _, (record,) = PassManager([Rewrite("clamp", relu_as_clamp)], verify=verify).run(simple())
        assert record.evidence.scope == scope
    wrong = Rewrite("wrong", lambda program: edited(program, lambda copy: retarget(copy, aten.neg.default)))
    result, (record,) = PassManager([wrong], verify=False).run(simple())
    assert record.evidence is None and torch.equal(result.run(X, torch.ones(4))[0], -X)


def test_no_passes_is_the_program_itself() -> None:
    program = simple()
    assert PassManager([]).run(program) == (program, ())


# -- passes that do wrong -------------------------------------------------------------------------------------------


def test_only_instances_of_pass_are_taken() -> None:
    with pytest.raises(TypeError, match=r"must hold memopt\.Pass instances, not <class"):
        PassManager([Rewrite])
    with pytest.raises(TypeError, match="must hold"):
        PassManager([lambda program: PassResult(program)])


def test_a_pass_that_raises_is_named_with_those_before_it() -> None:
    def fail(program: Program) -> Program:
        raise KeyError("lost")

    assert error_of(fail) == "pass wrong (after first): KeyError: 'lost'"
    with pytest.raises(PassError, match=r"^pass alone: KeyError") as caught:
        PassManager([Rewrite("alone", fail)]).run(simple())
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("verify", [True, False])
def test_a_pass_that_breaks_the_representation_is_named(verify: bool) -> None:
    def unfinished(program: Program) -> Program:
        copy = program.copy()
        with copy.graph.inserting_before(copy.calls[1]):
            copy.calls[1].update_arg(0, copy.graph.call_function(aten.neg.default, (copy.calls[0],)))
        return copy

    def disordered(program: Program) -> Program:
        copy = program.copy()
        copy.calls[1].append(copy.calls[0])
        return copy

    assert error_of(unfinished, verify=verify) == "pass wrong (after first): neg_default has no meta['val']"
    assert error_of(disordered, verify=verify).startswith("pass wrong (after first): ")
    assert "pass wrong (after first): ProgramError: relu: RuntimeError: " in error_of(
        lambda program: edited(program, lambda copy: copy.calls[0].update_arg(0, "x")), verify=verify
    )


def test_a_pass_whose_numbers_differ_is_named_with_the_node() -> None:
    found = error_of(lambda program: edited(program, lambda copy: retarget(copy, aten.neg.default)))
    assert found.startswith("pass wrong (after first): relu: results differ by up to ")
    assert found.endswith("bitwise equality declared")


def test_the_declared_tolerance_is_what_is_granted() -> None:
    def associate(program: Program) -> Program:
        def edit(copy: Program) -> None:
            a, b = copy.calls
            x, y, z = copy.placeholders
            a.args, b.args = (y, z), (x, a)

        return edited(program, edit)

    program = trace(lambda x, y, z: (x * y * z,), *torch.rand(3, 500))
    _, (record,) = PassManager([Rewrite("associate", associate, tolerance=4.0)]).run(program)
    assert 0 < record.evidence.max_abs_error < 1e-5
    with pytest.raises(PassError, match="bitwise equality declared"):
        PassManager([Rewrite("associate", associate)]).run(program)


@pytest.mark.parametrize("copied", [False, True])
def test_a_pass_that_edits_what_it_was_given_is_named(copied: bool) -> None:
    def graph(program: Program) -> PassResult:
        retarget(program, aten.neg.default)
        return PassResult(program.copy() if copied else program)

    def annotation(program: Program) -> PassResult:
        program.calls[0].meta["inplace"] = 0
        return PassResult(program.copy() if copied else program)

    def weights(program: Program) -> PassResult:
        program.state["w_1"].mul_(2)
        return PassResult(program.copy() if copied else program)

    for function in (graph, annotation, weights):
        assert error_of(function) == "pass wrong (after first): edited the program that it was given, not a copy"


def test_a_pass_that_returns_something_else_is_named() -> None:
    assert error_of(lambda program: None) == "pass wrong (after first): returned NoneType, not a PassResult"


def test_the_way_the_program_is_called_may_not_change() -> None:
    def other_input(program: Program) -> Program:
        entries = (program.inputs[0], dataclasses.replace(program.inputs[1], kind=InputKind.BUFFER))
        return dataclasses.replace(program, inputs=entries)

    def fewer_outputs(program: Program) -> Program:
        copy = program.copy()
        copy.graph.output_node().args = ([],)
        return copy.finish(outputs=())

    for function in (other_input, fewer_outputs):
        assert "inputs or outputs are others than before" in error_of(function)


def test_a_program_that_is_wrong_from_the_start_is_no_passs_fault() -> None:
    program = simple().copy()
    del program.calls[0].meta["val"]
    with pytest.raises(RuntimeError, match=r"^relu has no meta") as caught:
        PassManager([Rewrite("clamp", relu_as_clamp)]).run(program)
    assert not isinstance(caught.value, PassError)


def test_a_rewrite_is_tried_on_what_is_still_there_and_refusals_are_kept() -> None:
    program = trace(lambda x: (x.exp().sin().cos(),), torch.randn(3))
    seen = []

    def rewrite(current: torch.fx.Node) -> Change | None:
        seen.append(current.name)
        if current.name == "exp":
            raise Refused("it is the first")
        if current.name == "cos":
            return None
        (cos,) = current.users
        cos.replace_all_uses_with(current)
        program.graph.erase_node(cos)
        return Change("cos is gone", ("cos",), ())

    changes, refusals = attempt_each(program.calls, rewrite)
    assert seen == ["exp", "sin"], "what was erased has no turn"
    assert [change.before for change in changes] == [("cos",)]
    assert refusals == [Refusal("exp", "it is the first")]


# -- what is not done again -----------------------------------------------------------------------------------------


def test_a_program_is_checked_once_however_many_passes_are_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clamped: list[Program] = []

    def once(program: Program) -> Program:
        clamped[:] = clamped or [relu_as_clamp(program)]
        return clamped[0]

    program, passes = simple(), [Rewrite("same", PassResult), Rewrite("clamp", once), Rewrite("last", PassResult)]
    checked: list[Program] = []
    check = Program.check
    monkeypatch.setattr(Program, "check", lambda self: (checked.append(self), check(self))[1])
    PassManager(passes, False).run(program)
    PassManager(passes).run(program)
    assert checked == [program, *clamped]


def test_a_program_that_was_edited_since_is_checked_again() -> None:
    program = simple()
    PassManager([], False).run(program)
    program.calls[1].args = (program.calls[0],)
    with pytest.raises(ProgramError):
        PassManager([], False).run(program)
    other = simple()
    PassManager([], False).run(other)
    other.calls[0].meta["val"] = other.calls[0].meta["val"].new_empty(2, 2)
    with pytest.raises(ProgramError, match="its operation gives"):
        PassManager([], False).run(other)
