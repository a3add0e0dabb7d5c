"""Where memopt's own code lies: by frames in it errors, and lines of the user's, are told apart from its own."""

from __future__ import annotations

import os

MEMOPT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder of all its rooms, with a separator at its end."""
