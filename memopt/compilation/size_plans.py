"""How often code for many sizes was cut by a plan, and whether it is the next time."""

from __future__ import annotations


class SizePlans:
    """Of one session.

    Attributes:
        wanted: whether a plan cuts code for many sizes, and not torch's own partition.
        made: how often one did.
    """

    def __init__(self) -> None:
        """No code that torch has cut was over the budget yet."""
        self.wanted, self.made = False, 0

    def begins(self) -> bool:
        """Code for many sizes is about to be lowered: whether a plan cuts it."""
        self.made += self.wanted
        return self.wanted

    def want(self) -> None:
        """Cut such code by a plan from now on."""
        self.wanted = True

    def end(self, most: int) -> None:
        """Make no further plan: of so many that may be made, the last one was made."""
        self.made = most
