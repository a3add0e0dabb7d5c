"""Cut a failing program down: leave out lines while it still fails in the same way."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from typing import Any

from tests.forks import fork
from tests.modules.judging import CRASH, Verdict, judge
from tests.modules.programs import judged_by_eager


def minimised(name: str, source: str, verdict: Verdict, engine: str, budget: Any = None, verify: Any = False) -> str:
    """The source without the lines (or blocks of lines) that the failure does not need."""
    lines, again = source.splitlines(), True
    while again:
        again = False
        for at in reversed(range(len(lines))):
            if at >= len(lines):
                continue
            for candidate in _without(lines, at):
                if _fails(name, candidate, verdict, engine, budget, verify):
                    lines, again = candidate, True
                    break
    return "\n".join(lines) + "\n"


def _without(lines: list[str], at: int) -> list[list[str]]:
    """The lines without one and what is indented under it; and with an operation of it replaced by its operand."""
    line = lines[at]
    if not line.strip() or line.lstrip().startswith(("def ", "return [", "super()")):
        return []
    depth = len(line) - len(line.lstrip())
    end = at + 1
    while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > depth):
        end += 1
    found = [lines[:at] + lines[end:]] if not line.lstrip().startswith("return") else []
    assigned = re.match(r"(\s*)(v\d+) = (.*)", line)
    if assigned:
        for operand in dict.fromkeys(re.findall(r"\b[vx]\d+\b", assigned[3])):
            swapped = [re.sub(rf"\b{assigned[2]}\b", operand, text) for text in lines[end:]]
            found.append(lines[:at] + swapped)
    if line.lstrip().startswith("return (") and line.count(",") > 1:
        parts = line.strip()[len("return (") : -1].split(", ")
        for i in range(len(parts)):
            kept = ", ".join(part for j, part in enumerate(parts) if j != i).rstrip(",")
            found.append([*lines[:at], line[:depth] + f"return ({kept},)", *lines[at + 1 :]])
    return found


def _fails(name: str, lines: list[str], verdict: Verdict, engine: str, budget: Any, verify: Any) -> bool:
    """Whether the lines fail so, found out in a fork of this process: a cut may crash it, or have no end."""
    child = fork()
    if child == 0:
        signal.alarm(60)
        same = False
        with contextlib.suppress(Exception):  # a cut may leave a source that says nothing: a def without a body, say
            program = judged_by_eager(name, "\n".join(lines) + "\n")
            found = None if program is None else judge(program, engine, budget, verify)
            same = found is not None and (found.kind, _gist(found.detail)) == (verdict.kind, _gist(verdict.detail))
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    died = os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGALRM
    return died if verdict.kind == CRASH else os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


def _gist(detail: str) -> str:
    """What a failure is about, without numbers and names."""
    return re.sub(r"[vwxmb]?\d+(\.\d+)?", "", detail)[:40]
