"""Why code with symbolic sizes does not serve a call: raised before anything of its graph has run."""

from __future__ import annotations


class SizesError(Exception):
    """Code for many sizes does not serve this one, which is planned by itself.

    Attributes:
        others: whether it serves others.
    """

    def __init__(self, reason: str, *, others: bool = False) -> None:
        super().__init__(reason)
        self.others = others


class MadeAnewError(SizesError):
    """Code for many sizes is to be made anew for these sizes, and serves others then, too."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, others=True)
