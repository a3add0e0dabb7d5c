"""What a plan allows for before it was seen: the loss of a caller, and calls of other models of the budget."""

from __future__ import annotations

import dataclasses

from memopt.memory.tangents import Tangents

# Less than this part of what other models are to take is not left to them.
_LEAST_SHARE = 1 / 8


class LossAllowance:
    """What is allowed for beside a step's graphs, and less of it where no plan keeps the budget so.

    Attributes:
        tangents: the gradients of what a call returns, with the loss that is allowed for.
        usual: bytes that the loss which is usual takes, whether it is allowed for or not: eager holds that.
        reserved: bytes left to calls of other models before this one's backward.
        allows: whether a loss is allowed for as long as none was seen.
    """

    def __init__(self) -> None:
        """All is allowed for."""
        self.tangents, self.reserved = Tangents(), 0
        self._share, self.usual = 1.0, 0
        self.allows, self._usual = True, False

    def counts(self, tangents: Tangents, *, whole: bool) -> None:
        """Count these gradients of what a call returns, with the loss that is allowed for.

        Args:
            tangents: with all that a loss may take.
            whole: whether all of eager's own peak is the budget: the usual loss is counted with that.
        """
        if self.allows:
            self.usual = tangents.usual
        usual = self._usual or whole
        self.tangents = dataclasses.replace(tangents, loss=tangents.usual) if usual else tangents

    def reserves(self, size: int) -> None:
        """Leave to other models' calls what is left by now of so many bytes."""
        self.reserved = int(self._share * size)

    def lessens(self, *, seen: bool, several: bool) -> bool:
        """Allow for less; whether more was allowed for.

        A usual loss is allowed for before none is, and always beside several graphs; of what is left to other models
        half is left at each time, before nothing is.

        Args:
            seen: whether the loss was seen: then it is counted as it is.
            several: whether a call is several graphs.
        """
        if self.reserved and self._share > _LEAST_SHARE and not several:
            self._share /= 2
            return True
        loss = self.tangents != Tangents() and not seen
        if self.allows and loss and self.tangents.usual < self.tangents.loss:
            self._usual, self.tangents = True, dataclasses.replace(self.tangents, loss=self.tangents.usual)
            return True
        allowed = self.allows and (loss or self.reserved > 0) and not several
        if allowed:
            self.allows, self.tangents, self.reserved = False, Tangents(), 0
        return allowed
