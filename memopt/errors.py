"""What is said of an error where one line of it is kept."""

from __future__ import annotations


class ShortOfMemoryError(MemoryError, RuntimeError):
    """The device had less memory left than a step needs.

    It is a RuntimeError as torch's own is: loops that look for a batch that fits go by that, and by its words.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, or its type's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def cause_line(error: BaseException) -> str:
    """The same of what the error came of in the end."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
