"""Budgets: what a user may write for one, how sizes are printed, and the error that says that nothing fits."""

from __future__ import annotations

import dataclasses
import fractions
import math
import numbers
import re
from typing import Any, Protocol

_PREFIXES = ("", "k", "M", "G", "T", "P")
_SIZE = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?)\s*(.*)", re.DOTALL | re.IGNORECASE)
_UNIT = re.compile(r"([kmgtp]?)(i?)b|([kmgtp])(i?)", re.IGNORECASE)
_LARGEST = 2**63 - 1  # what torch can count
_LITTLE = 0.03  # of a minimum: what no budget below it has to keep to


@dataclasses.dataclass(frozen=True)
class Budget:
    """A budget as the user wrote it: exactly one of `bytes` and `fraction` is set.

    Attributes:
        bytes: an absolute number of bytes, at least 1.
        fraction: a share, in (0, 1], of the peak that the model has without memopt.
        text: what the user wrote, for messages and reports.
    """

    bytes: int | None
    fraction: float | None
    text: str

    def resolve(self, unconstrained_bytes: int) -> int:
        """Return the budget in bytes, given the peak in bytes that the model has without memopt."""
        if self.bytes is not None:
            return self.bytes
        assert self.fraction is not None
        return math.floor(fractions.Fraction(str(self.fraction)) * unconstrained_bytes)


def parse_budget(text: str | int | float) -> Budget:
    """Read a budget.

    - A string with a unit is a size: kB, MB, GB, TB, PB are powers of 1000, KiB, MiB, GiB, TiB, PiB of 1024, B is
      one byte. The B may be left out ("20G", "20Gi"). Upper and lower case mean the same (never bits), blanks are
      ignored, decimals and exponents are allowed ("1.5 GiB", "1e3MB"). Part of a byte is dropped.
    - "60%", and a decimal fraction without a unit ("0.6" or the float 0.6, in (0, 1]), is that share of the peak that
      the model has without memopt.
    - An int is a number of bytes. A string of digits alone ("20") is refused: its unit is anyone's guess.

    Raises:
        ValueError: anything else; the message is one line that says what to write instead.
    """
    if isinstance(text, str):
        return _parse_text(text)
    if isinstance(text, bool):
        raise ValueError(f"budget {text}: write a size like '20GB' or a fraction like 0.5")
    if isinstance(text, numbers.Integral):
        return _absolute(fractions.Fraction(int(text)), str(int(text)))
    if isinstance(text, numbers.Real):
        return _share(float(text), str(float(text)))
    raise ValueError(f"budget of type {type(text).__name__}: write a size like '20GB' or a fraction like 0.5")


def _parse_text(text: str) -> Budget:
    written = text.strip()
    shown = written if len(written) <= 40 else written[:37] + "..."
    match = _SIZE.fullmatch(written)
    if match is None:
        raise ValueError(f"budget {shown!r}: write a size like '20GB' or '20GiB', or a fraction like '60%'")
    number, unit = match.groups()
    if len(number) > 40:
        raise ValueError(f"budget {shown!r}: too many digits")
    value = fractions.Fraction(number)
    if unit == "%":
        return _share(float(value / 100), shown)
    if unit == "":
        if "." in number:
            return _share(float(value), shown)
        raise ValueError(f"budget {shown!r}: {shown} what? say {shown}GB or {shown}GiB")
    parsed = _UNIT.fullmatch(unit)
    if parsed is None or (parsed[2] and not parsed[1]):
        raise ValueError(f"budget {shown!r}: unknown unit {unit[:20]!r}; say kB, MB, GB, TB or KiB, MiB, GiB, TiB")
    prefix, binary = parsed[1] or parsed[3] or "", parsed[2] or parsed[4]
    power = [prefix.lower() for prefix in _PREFIXES].index(prefix.lower())
    return _absolute(value * (1024 if binary else 1000) ** power, shown)


def _absolute(size: fractions.Fraction, text: str) -> Budget:
    if size <= 0:
        raise ValueError(f"budget {text!r}: must be more than nothing")
    if size < 1:
        raise ValueError(f"budget {text!r}: less than one byte")
    if size > _LARGEST:
        raise ValueError(f"budget {text!r}: more than any device can have")
    return Budget(math.floor(size), None, text)


def _share(value: float, text: str) -> Budget:
    if not math.isfinite(value):
        raise ValueError(f"budget {text!r}: must be finite")
    if value <= 0:
        raise ValueError(f"budget {text!r}: must be more than nothing")
    if value > 1:
        raise ValueError(f"budget {text!r}: a fraction is at most 1 (100%); write bytes as an int or like '20GB'")
    return Budget(None, value, text)


# -- printing -----------------------------------------------------------------------------------------------------


def format_bytes(size: int, *, short: bool = False) -> str:
    """Print a number of bytes: `20.00 GB (18.63 GiB)`; with `short`, `20.00 GB`; below 1000 bytes, `512 B`."""
    decimal = _scaled(size, 1000)
    if short or abs(size) < 1000:
        return decimal
    return f"{decimal} ({_scaled(size, 1024)})"


def _scaled(size: int, base: int) -> str:
    power = 0
    # 999,999 is 1.00 MB, not 1000.00 kB: compare what would be printed.
    while power < len(_PREFIXES) - 1 and abs(_hundredths(size, base**power)) >= base * 100:
        power += 1
    if power == 0:
        return f"{size} B"
    prefix = _PREFIXES[power] if base == 1000 else _PREFIXES[power].upper() + "i"
    whole, rest = divmod(abs(_hundredths(size, base**power)), 100)
    return f"{'-' if size < 0 else ''}{whole}.{rest:02d} {prefix}B"


def _hundredths(size: int, unit: int) -> int:
    return round(fractions.Fraction(size * 100, unit))


# -- the error ------------------------------------------------------------------------------------------------------


class Parts(Protocol):
    """The parts of a peak, in bytes: what `memopt.estimate` returns has them."""

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    workspace: int


class BudgetError(ValueError):
    """No plan keeps the budget.

    Attributes:
        minimum_bytes: the minimum in bytes that a plan was found for.
        budget_bytes: the budget in bytes that was asked for.
        breakdown: the parts of that least peak; None when they are not known.
        stuck_bytes: what the device's allocator had cached before, and cannot hand back: it counts as well. 0 where
            that is no more than is left to the allocator anyway.
        at_least: whether nothing was planned, as no plan goes below the minimum: it may not be reached by any.
        beside: what takes room beside the plan, in words: an earlier call of the step, a part that is not captured.
    """

    def __init__(
        self,
        minimum_bytes: int,
        budget_bytes: int,
        breakdown: Parts | Any | None = None,
        stuck_bytes: int = 0,
        beside: str = "",
        *,
        at_least: bool = False,
    ) -> None:
        super().__init__(_explain(minimum_bytes, budget_bytes, breakdown, stuck_bytes, beside, at_least))
        self.minimum_bytes = minimum_bytes
        self.budget_bytes = budget_bytes
        self.breakdown = breakdown
        self.stuck_bytes = stuck_bytes
        self.beside = beside
        self.at_least = at_least

    def with_others(self, size: int, others: str) -> BudgetError:
        """The same where the minimum, as a budget in bytes, is of so many bytes more, which a fraction does not count.

        Args:
            size: bytes of other tensors of the process.
            others: these in words.
        """
        return self._with(self.minimum_bytes + size, f"{others}, which are in that: a budget in bytes is of them too")

    def not_below(self, size: int) -> BudgetError:
        """The same where the process has held so many bytes before the call, which a budget in bytes is of, too."""
        if size <= self.minimum_bytes:
            return self
        held = format_bytes(size, short=True)
        return self._with(size, f"the process has held {held} before the call, which a budget in bytes is of too")

    def allowing(self, without_bytes: int, output: str = "") -> BudgetError:
        """The same, saying what of the minimum is allowed for a loss that was not seen yet where that is much.

        Args:
            without_bytes: the minimum with nothing allowed for it.
            output: the largest that the loss is of, in words with its place.
        """
        allowed = self.minimum_bytes - without_bytes
        if allowed <= _LITTLE * self.minimum_bytes:
            return self
        size, without = format_bytes(allowed, short=True), format_bytes(without_bytes, short=True)
        of = f" of {output}" if output else ""
        words = f"a loss{of} that was not seen yet is allowed {size}: the minimum is at most that, and {without} where "
        words += "the loss holds nothing; one that the model's forward computes is planned with it, and may take less"
        return self._with(self.minimum_bytes, words)

    def _with(self, least: int, words: str) -> BudgetError:
        """The same with another minimum, and with more in words that takes room beside the plan."""
        beside = f"{self.beside}; {words}" if self.beside else words
        return BudgetError(least, self.budget_bytes, self.breakdown, self.stuck_bytes, beside, at_least=self.at_least)

    def __reduce__(self) -> tuple[Any, ...]:
        known = self.minimum_bytes, self.budget_bytes, self.breakdown, self.stuck_bytes, self.beside, self.at_least
        return _restore, (type(self), *known), {**self.__dict__, "args": self.args}  # what was added to the text too


class OutOfBudgetError(BudgetError, RuntimeError):
    """A call of a model that no plan keeps within the budget, as loops that look for a batch that fits read it.

    They go by what torch raises: a RuntimeError that speaks of being out of memory. Inside memopt a `BudgetError` is
    none, so that no trial takes it for an operator that failed.
    """

    @classmethod
    def of(cls, error: BudgetError) -> OutOfBudgetError:
        """The same refusal without its traceback, most of which is of Dynamo's frames, whose tensors that holds."""
        if isinstance(error, cls):
            return error
        made: OutOfBudgetError = _restore(cls, *error.__reduce__()[1][1:])
        made.__dict__.update(error.__dict__)
        made.args = (f"{error.args[0]}. Within this budget the call is out of memory.",)
        return made


def _restore(cls: type[BudgetError], *known: Any) -> Any:
    names = ("minimum_bytes", "budget_bytes", "breakdown", "stuck_bytes", "beside", "at_least")
    return cls(**dict(zip(names, known, strict=False)))


def _explain(
    minimum_bytes: int, budget_bytes: int, breakdown: Any, stuck_bytes: int, beside: str, at_least: bool
) -> str:
    names = ("parameters", "gradients", "optimizer_state", "activations", "workspace")
    parts = {name: getattr(breakdown, name) for name in names} if breakdown is not None else {}
    largest = sorted((name for name in names if parts.get(name)), key=lambda name: -parts[name])
    least = format_bytes(minimum_bytes)
    least = f"what stays during a step takes at least {least}" if at_least else f"the minimum is {least}"
    message = f"no plan fits the budget of {format_bytes(budget_bytes)}: {least}"
    if largest:
        shown = (f"{name.replace('_', ' ')} {format_bytes(parts[name], short=True)}" for name in largest[:3])
        message += f", the largest parts {', '.join(shown)}"
    if stuck_bytes:
        size = format_bytes(stuck_bytes, short=True)
        message += f"; the allocator caches {size} that it cannot hand back, as tensors lie among it"
    if beside:
        message += f"; beside the plan, {beside}"
    help_ = [f"a budget of {'more than ' * at_least}{_enough(minimum_bytes)}"]
    if not parts or parts["activations"] or parts["workspace"]:
        help_.append("a smaller batch")
    if parts.get("optimizer_state"):
        help_.append("an optimizer with less state")
    if stuck_bytes:
        help_.append("torch.cuda.empty_cache() before those tensors are made")
    last = f" or {help_[-1]}" if len(help_) > 1 else ""
    return f"{message}. What would help: {', '.join(help_[:-1]) or help_[-1]}{last}"


def _enough(minimum_bytes: int) -> str:
    """Print a size that `parse_budget` reads as no less than the minimum: what is advised must work."""
    power = min((len(str(minimum_bytes)) - 1) // 3, len(_PREFIXES) - 1)
    if power == 0:
        return f"{minimum_bytes}B"
    whole, rest = divmod(-(-minimum_bytes * 100 // 1000**power), 100)
    return f"{whole}.{rest:02d}{_PREFIXES[power]}B"
