"""Where torch's own code lies, by whose frames it is told who raised an error; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import os

import torch

TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
"""The folder of all of it, with a separator at its end."""

AROUND_CALLS = frozenset(os.path.join(TORCH, "_dynamo", name) for name in ("eval_frame.py", "external_utils.py"))
"""Files of Dynamo's whose frames lie around every compiled call."""

COMPILER = tuple(os.path.join(TORCH, name) + os.sep for name in ("_dynamo", "_functorch", "_inductor"))
"""Folders of what compiles, each with a separator at its end."""
