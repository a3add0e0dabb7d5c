"""Sizes that code for many sizes was counted at: those at which it keeps the budget, and those at which it does not.

Counting takes as long as many steps of a small model. So it is done for larger sizes than are needed, where these cover
the others: for the largest that each size was so far, and the more beyond that, the more often sizes have grown.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from memopt.capture.dynamo import Hooks
from memopt.errors import first_line
from memopt.inductor.replay import ReplayError
from memopt.step.sizes_apart import SizesError
from memopt.torch_compat.inductor_errors import InductorError
from memopt.torch_compat.symbols import Sizes, UnknownSizeError, symbols_of


class ServedSizes:
    """The sizes of one graph's inputs.

    Attributes:
        grows: whether larger sizes make every tensor larger: then a size that is kept covers all smaller ones.
    """

    def __init__(self, hooks: Hooks, example_inputs: Sequence[Any]) -> None:
        """Nothing is counted yet."""
        self.grows = False
        self._hooks, self._symbols = hooks, symbols_of(example_inputs)
        self._kept: list[Sizes] = []
        self._over: list[Sizes] = []

    def of(self, args: Sequence[Any]) -> Sizes:
        """The sizes of a call with these inputs of the graph."""
        return {symbol: args[place] for place, symbol in self._symbols.items()}

    def listed(self, sizes: Sizes) -> tuple[int, ...]:
        """The sizes in the order of the graph's inputs."""
        return tuple(sizes[symbol] for symbol in self._symbols.values())

    def named(self, listed: Sequence[int]) -> Sizes:
        """Sizes by symbol, of those in the order of the graph's inputs.

        Raises:
            ValueError: there are more or fewer.
        """
        return dict(zip(self._symbols.values(), listed, strict=True))

    def to_count(self, sizes: Sizes, eighths: int, seen: Sizes | None = None) -> list[Sizes]:
        """What to count so that these sizes are known: larger ones that cover them first, if such serve; last these.

        Args:
            sizes: that are needed.
            eighths: how much further sizes are counted than any that are known, in parts of them.
            seen: the largest of each size in any call so far.
        """
        if not self.grows:
            return [sizes]
        known = [*self._kept, *([] if seen is None else [seen])]
        most = {symbol: max((each[symbol] for each in known), default=0) for symbol in sizes}
        further = {symbol: size + size * eighths // 8 for symbol, size in sizes.items()}
        together = {symbol: further[symbol] if size > most[symbol] else most[symbol] for symbol, size in sizes.items()}
        larger = [together] if together == further else [together, further]
        return [*(each for each in larger if each != sizes and not self.refused(each)), sizes]

    def keep(self, sizes: Sizes) -> None:
        """The budget is kept at these sizes."""
        self._kept.append(sizes)

    def refuse(self, sizes: Sizes) -> None:
        """The budget is not kept at these sizes."""
        self._over.append(sizes)

    def forget(self) -> None:
        """Nothing is counted: the code is made anew."""
        self.grows = False
        self._kept.clear()
        self._over.clear()

    def kept(self, sizes: Sizes) -> bool:
        """Whether it is known that the budget is kept."""
        return any(self._covers(known, sizes) for known in self._kept)

    def refused(self, sizes: Sizes) -> bool:
        """Whether it is known that the budget is not kept."""
        return any(self._covers(sizes, known) for known in self._over)

    def not_kept(self, sizes: Sizes) -> SizesError:
        """That the budget is not kept at these sizes, as an error."""
        listed = (f"{self._hooks.called(place)} = {sizes[symbol]}" for place, symbol in self._symbols.items())
        return SizesError(f"code for many sizes does not keep the budget at {', '.join(listed)}", others=True)

    def _covers(self, larger: Sizes, sizes: Sizes) -> bool:
        covers = _none_is_larger if self.grows else operator.eq
        return bool(covers(sizes, larger))


@contextlib.contextmanager
def sizes_errors() -> Iterator[None]:
    """Within: what code for many sizes cannot do is a SizesError."""
    try:
        yield
    except InductorError as error:
        raise SizesError(f"Inductor has no code for this graph with symbolic sizes: {first_line(error)}") from error
    except ReplayError as error:
        raise SizesError(f"what code with symbolic sizes takes is not known: {error}") from error
    except UnknownSizeError as error:
        raise SizesError(str(error)) from error


def _none_is_larger(sizes: Sizes, known: Sizes) -> bool:
    return all(size <= known[symbol] for symbol, size in sizes.items())
