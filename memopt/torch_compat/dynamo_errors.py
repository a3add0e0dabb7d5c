"""What Dynamo raises, around errors of a model's and of a backend's too; tried on torch 2.11 and 2.13."""

import contextlib
import os
import re
import traceback

from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._dynamo.exc import TorchRuntimeError as TorchRuntimeError

from memopt.common.own_files import MEMOPT
from memopt.torch_compat.source_files import TORCH

# Whose frames lie between Dynamo's: memopt's of what it is followed with, in this folder.
_BETWEEN = (TORCH, contextlib.__file__, os.path.join(MEMOPT, "torch_compat") + os.sep)
_FRAME = os.path.join(TORCH, "_dynamo", "convert_frame.py")


def is_tracers_own(error: BaseException) -> bool:
    """Whether Dynamo itself fails as it traces a frame: no code of others runs from there to the error."""
    files = [os.path.abspath(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    if not files or not files[-1].startswith(TORCH):
        return False
    while files and files[-1] != _FRAME:
        if not files.pop().startswith(_BETWEEN):
            return False
    return bool(files)


def place_in_model(error: BaseException) -> str:
    """`file:line` of the model's code that Dynamo was at, by what it adds to an error; empty where it adds nothing."""
    frames = re.findall(r'File "([^"\n]+)", line (\d+)', str(error).partition("from user code:")[2])
    frames = [frame for frame in frames if not frame[0].startswith(TORCH)] or frames
    return f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else ""
