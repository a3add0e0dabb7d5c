"""Writing reports whole or not at all, and reading them back."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from memopt.report.html_page import to_html
from memopt.report.json_format import from_json, to_json
from memopt.report.record import Report
from memopt.report.text import curve_text, to_text

_RENDERERS = {"json": to_json, "html": to_html, "txt": to_text, "text": to_text, "curve": curve_text}


def render(report: Report, form: str) -> str:
    """The report as text in the given form: `json`, `html`, `text`, or `curve`. It ends with a newline.

    Raises:
        ValueError: an unknown form.
    """
    if form not in _RENDERERS:
        raise ValueError(f"unknown report format {form!r}: choose json, html, text or curve")
    return _RENDERERS[form](report).rstrip("\n") + "\n"


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file so that a reader finds either the old one or the whole new one, never a part.

    Raises:
        OSError: the folder does not exist or is not writable; nothing is left behind.
    """
    target = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp makes the file private; an ordinary new file follows the umask.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def load(path: str | os.PathLike[str]) -> Report:
    """Read a report that was saved as JSON.

    Raises:
        ValueError: the file is no memopt report, or one of a version that this memopt does not know.
        OSError: the file cannot be read.
    """
    try:
        return from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
