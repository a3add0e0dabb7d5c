"""The pass that lets values wait on the host: programs stay as they are, and engines look for it after the plan."""

import torch

import memopt
from memopt.passes.offload import Offload
from memopt.step.stages import stages_of
from tests.passes.build import capture_joint


def test_the_program_stays_as_it_is():
    program = capture_joint(lambda x: x.sin().sum(), torch.randn(4, requires_grad=True))
    result = Offload().run(program)
    assert result.program is program and not result.changes and not result.refusals


def test_it_is_used_by_consent_and_no_plan_waits_for_it():
    assert "offload" not in [item.name for item in memopt.TRAINING]
    assert "offload" in [item.name for item in stages_of((*memopt.TRAINING, Offload())).late]


def test_what_it_is_set_to_is_part_of_what_plans_are_kept_under():
    assert sorted(vars(Offload()).items()) == [("least_bytes", 2**24), ("share", 0.25)]
    assert vars(Offload(least_bytes=1)) != vars(Offload())
