"""Ranks that train one model together begin to do so together: one that is refused its budget lets no other wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from memopt.budget import BudgetError, format_bytes
from memopt.capture.export import CaptureError
from memopt.memory.distributed import groups_of, most_of

_RANKS = 2**20  # more than there are


class OtherRankError(Exception):
    """Another rank has failed: inside memopt this is no refusal of a plan, which another plan might answer."""

    def __init__(self, rank: int, needed: int) -> None:
        super().__init__(f"rank {rank} has failed")
        self.rank, self.needed = rank, needed

    def as_error(self) -> Exception:
        """What the user is told on this rank."""
        if not self.needed:
            return CaptureError(f"rank {self.rank} failed in its first step, and says why there: no rank goes on")
        error, needed = BudgetError(self.needed, 0), format_bytes(self.needed)
        error.args = (f"no plan fits the budget of another rank: rank {self.rank} needs {needed}, so no rank goes on",)
        return error


class Agreement:
    """Of the ranks that train a model by DistributedDataParallel or FSDP2, on their first step within a budget.

    Later steps are each rank's own: which of them is planned anew goes by its batches.
    """

    def __init__(self, model: nn.Module, *, due: bool) -> None:
        """Nothing is agreed on yet; `due` is whether anything is to be, as there is a budget."""
        self._model, self._due = model, due

    @contextlib.contextmanager
    def sought(self) -> Iterator[None]:
        """Within: a call. If it is the first of training and fails on one rank, it fails on all.

        Raises:
            BudgetError: another rank has no plan within its budget.
            CaptureError: another rank failed otherwise.
        """
        try:
            yield
            self.reach()  # where no graph was compiled
        except OtherRankError as error:
            raise error.as_error() from None
        except Exception as error:
            self.tell(error)
            raise

    def reach(self) -> None:
        """Say that this rank can take its first step, and hear what the others have found.

        Raises:
            OtherRankError: one has failed.
        """
        needed, rank = self._heard(0)
        if rank:
            raise OtherRankError(rank - 1, needed)

    def tell(self, failure: Exception) -> None:
        """Tell those that wait for this rank that it has failed, and in the error which rank needs most."""
        own = failure.minimum_bytes if isinstance(failure, BudgetError) else 0
        needed, rank = self._heard(own * _RANKS + 1)
        if isinstance(failure, BudgetError) and needed > own:
            failure.minimum_bytes = needed
            failure.args = (f"{failure}; rank {rank - 1} needs {format_bytes(needed)}, the most of all ranks",)

    def _heard(self, said: int) -> tuple[int, int]:
        """What the rank that needs most needs in bytes, and its number from 1 on; zeros where none has failed."""
        if not self._due or not torch.is_grad_enabled():
            return 0, 0
        groups = groups_of(self._model)
        if not groups:
            return 0, 0
        self._due = False
        device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
        return divmod(most_of(said + torch.distributed.get_rank() if said else 0, groups, device), _RANKS)
