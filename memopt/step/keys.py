"""What plans and code of a step go by, where they are kept on disk."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memopt.common.own_files import MEMOPT
from memopt.pass_manager import Pass
from memopt.program import Program
from memopt.step.planned import fingerprint

if TYPE_CHECKING:
    from memopt.compilation.session import Session


def versions() -> str:
    """What code of a step depends on beside the step: a scope of what is kept on disk."""
    from memopt import __version__

    found = {"memopt": __version__, "code": _source(), "torch": torch.__version__, "source": torch.version.git_version}
    return json.dumps(found, sort_keys=True)


def step_facts(session: Session, program: Program) -> dict[str, Any]:
    """What a step's plans depend on but for its budget: the graph, its layout, what is resident, passes, and the place.

    Args:
        session: whose step it is.
        program: the step as captured.
    """
    libraries = session.resident.libraries  # of these a step tells, when it is taken
    return {
        "graph": fingerprint(program),
        "channels_last": session.rewriting.lays_out(program, session.exact),
        "resident": session.resident.total - libraries,
        "optimizer": max(0, session.optimizer_peak() - libraries),
        "seconds": session.plan_seconds,
        "passes": described(session.rewriting.passes),
        **place_of(session.resident.device),
    }


def place_of(device: torch.device) -> dict[str, Any]:
    """A device by its number, its kind and its memory in bytes."""
    if device.type != "cuda":
        return {"device": str(device)}
    found = torch.cuda.get_device_properties(device)
    return {"device": str(device), "name": found.name, "memory": found.total_memory}


def described(passes: Sequence[Pass]) -> list[str]:
    """Passes by their classes and settings, in order."""
    return [f"{type(item).__module__}.{type(item).__qualname__} {sorted(vars(item).items())}" for item in passes]


@functools.cache
def _source() -> str:
    """A digest of memopt's own source: what it made is that of its version only where nobody has changed it."""
    found = hashlib.sha256()
    root = Path(MEMOPT).resolve()
    for folder, folders, files in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
