"""Torch's own partition of a step, the one that torch.compile makes, and what lets it keep a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memopt.capture.dynamo import Hooks, compilation_of
from memopt.capture.joint import Partitioned, constants_to_attributes, drop_outputs, mutations_in_place, shown_by
from memopt.capture.let_go import mark_let_go
from memopt.common.phases import phase
from memopt.inductor.added import mark_added, return_early
from memopt.inductor.extra_rematerialization import rematerialize_saved
from memopt.inductor.kinds import is_library_call
from memopt.inductor.partition import saved_bytes
from memopt.inductor.peak_estimate import expected_bytes
from memopt.inductor.peak_lower_bound import peak_lower_bound
from memopt.inductor.weight_gradients import delay_weight_gradients
from memopt.memory.hand_over import mark_handed
from memopt.pass_manager import Pass
from memopt.step.budget_trial import step_decides
from memopt.step.own_copies import is_copy_of_input, keep_small_inputs
from memopt.step.plan_request import PlanRequest
from memopt.torch_compat.aot_autograd import aot_settings, merges_equal_nodes
from memopt.torch_compat.min_cut import min_cut

# Code of torch's partition takes no less than this share of what is expected of it: its order is Inductor's to choose.
# Once there is code, that of other cuts is taken to have the same share.
_LESS = 0.85
# Where a plan computes products and the like again for this share of the step's time, a cut without has no room.
_MUCH = 0.02
# If it is over the limit by at most limit / _LITTLE, it saves less: that costs a few kernels.
_LITTLE = 50


class MinCutPartition:
    """One graph's cut by torch, under one limit after the other.

    Attributes:
        spared: bytes that the cut without rewrites is to save less.
        short: whether code of the last cut may be over the limit.
    """

    def __init__(self, hooks: Hooks, request: PlanRequest) -> None:
        """Take what rewrites the joint graph, and what is asked of it: which rewrites is changed here."""
        self.hooks, self.request = hooks, request
        self.session = compilation_of(hooks)
        self.spared, self.short = 0, False
        # What is yet to be tried; the rewrites that reduce the minimum come in when they are needed.
        self._lowerings: list[tuple[Pass, ...]] | None = None
        # Bytes that code of the cut takes, by the rewrites it is made with, and bytes that it saved less.
        self._taken: dict[tuple[str, ...], tuple[int, int]] = {}
        self._in_vain = False  # whether saving less was seen not to lower the peak
        self._expected = 0  # bytes of the last cut
        self._share = _LESS  # of what is expected of a cut, what its code takes
        # While a first cut is looked for: all rewrites, the cut with them, its bytes, and whether its code may be over.
        self._with_all: tuple[tuple[Pass, ...], Partitioned, int, bool] | None = None

    def begin_anew(self) -> None:
        """Let all rewrites be tried again, with another limit."""
        self._lowerings = None

    def spare(self, excess: int, before: int | None = None) -> bool:
        """Have the cut save less, for the bytes that it took too much; whether that is but little.

        Args:
            excess: bytes by which it was over the limit.
            before: bytes that it saved less then; None: as many as now.
        """
        wanted = (self.spared if before is None else before) + excess + excess // 8
        if self.request.lowering or self._in_vain or excess <= 0 or wanted > self.session.limit_bytes // _LITTLE:
            return False
        self.spared = wanted
        return True

    def took(self, lowering: tuple[str, ...], taken: int) -> None:
        """Learn how many bytes code of the cut with these rewrites takes."""
        known, spared = self._taken.get(lowering, (0, 0))
        if not lowering:  # what is saved less may be in use again where the most is
            self._in_vain |= bool(known) and self.spared > spared and 2 * (known - taken) < self.spared - spared
        self._taken[lowering] = taken, self.spared
        if self._expected and self.session.step is not None:
            self._share = (taken - self.session.step.base) / self._expected

    def next_lowering(self) -> bool:
        """Take the next rewrites to try; whether there are any."""
        if self._lowerings is None:
            self._lowerings = self.session.lowerings()
        if self._lowerings:
            self.request.lowering, self.spared = self._lowerings.pop(0), 0
            return True
        return False

    def first_cut(self, joint: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Partitioned | None:
        """Both graphs by the first rewrites, of those yet to be tried, with which the budget may be kept.

        None where what the cut cannot do without is over the budget, with all rewrites that reduce the minimum too.
        """
        session = self.session
        if self._lowerings is None:
            asked = self.request.lowering
            self.hooks.rewrite(joint, options["num_fwd_outputs"], self.request)  # what there is to keep is known then
            if session.tight and self._computes_much_again(joint, options["num_fwd_outputs"]):
                self._lowerings = []
                return None
            lowering = session.kept_search.all_lowering()
            if session.tight and lowering and self._all_are_hopeless(joint, joint_inputs, **options):
                return None
            self.request.lowering = asked
        graphs = self.cut(joint, joint_inputs, **options)
        if graphs is None and self._lowerings is None and self._with_all is None:
            self._all_are_hopeless(joint, joint_inputs, **options)
        while graphs is None and self.next_lowering():
            graphs = self._cut_known(joint, joint_inputs, **options)
        self._with_all = None
        return graphs

    def _cut_known(self, joint: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Partitioned | None:
        """As `cut`; what was made with all rewrites, to see whether any helps, is not repeated."""
        if self._with_all is None or self._with_all[0] != self.request.lowering:
            return self.cut(joint, joint_inputs, **options)
        self.hooks.rewrite(joint, options["num_fwd_outputs"], self.request)
        _, graphs, self._expected, self.short = self._with_all
        return graphs

    def _computes_much_again(self, joint: fx.GraphModule, forward_outputs: int) -> bool:
        """Whether a plan recomputes so much of what torch's partition never does that this would be hopeless."""
        session = self.session
        self.hooks.rewrite(joint, forward_outputs, dataclasses.replace(self.request, search=True))
        if session.feasible and session.share_again(is_library_call) > _MUCH:
            return True
        session.forget_plan()
        return False

    def _all_are_hopeless(self, joint: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> bool:
        """Whether no rewrites let torch's own partition keep the budget: none takes less than all of them."""
        self.request.lowering = self.session.kept_search.all_lowering()
        graphs = self.cut(joint, joint_inputs, **options) if self.request.lowering else None
        if graphs is not None:
            self._with_all = self.request.lowering, graphs, self._expected, self.short
            return False
        self._lowerings = []
        return True

    def cut(
        self, joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **options: Any
    ) -> Partitioned | None:
        """Both graphs by the present rewrites; None where what cannot be fused is over the budget already."""
        program = self.hooks.rewrite(joint, num_fwd_outputs, self.request)
        assert self.hooks.captured is not None
        session = self.session
        known, spared = self._taken.get(tuple(item.key for item in self.request.lowering), (0, 0))
        too_much = known - session.usable(session.limit_bytes) if session.limit_bytes else 0
        if too_much > 0 and self.spared <= spared and not self.spare(too_much, spared):
            return None  # as was seen under a larger limit
        module = constants_to_attributes(program)
        mark_added(module, {node.name for node in self.hooks.captured.graph.nodes})
        kept = program.forward_outputs
        early = return_early(module, kept, save_overwritten(module, program.mutated))
        # What a rewrite computes twice on purpose is not to be merged again.
        plain = merges_equal_nodes() and not self.request.lowering
        with aot_settings(cse=plain), phase("cutting"):
            forward, backward = min_cut(module, joint_inputs, num_fwd_outputs=kept + early, **options)
        mark_let_go(forward, program)
        mark_handed(backward, program)
        if early:
            drop_outputs(forward, kept, kept + early)
        whole = forward, backward
        while True:
            if self.spared and not self.request.lowering:
                less = rematerialize_saved(*whole, kept, self.spared, program.mutated)
                if less is None:
                    return None
                forward, backward = less
            self._expected = expected_bytes(forward, backward, kept)
            share = int(self._expected * self._share)
            needed = max(saved_bytes(forward, kept), peak_lower_bound(forward, backward, kept), share)
            excess = session.excess_with(needed)
            if not excess or step_decides(session, self.hooks, excess):
                break
            if not self.spare(excess):
                return None
        self.short = bool(session.excess_with(self._expected))
        keep_small_inputs(forward, backward, kept)
        backward = delay_weight_gradients(forward, backward, kept, session.excess_with)
        mutations_in_place(forward, program, num_fwd_outputs)
        return forward, backward


def save_overwritten(module: fx.GraphModule, mutated: Collection[str]) -> set[fx.Node]:
    """Have torch's partitioner recompute nothing of inputs that forward writes to; return what is computed of them.

    In backward it would be computed of what is there then. The user's own copies of inputs are saved for that, too.
    """
    inputs = [node for node in module.graph.nodes if node.op == "placeholder" and node.name in mutated]
    readers = {reader for shown in shown_by(inputs) for reader in shown.users if reader.op == "call_function"}
    readers |= {node for node in module.graph.nodes if node.op == "call_function" and is_copy_of_input(node)}
    for reader in readers:
        reader.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return readers
