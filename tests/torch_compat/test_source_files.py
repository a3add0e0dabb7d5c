from __future__ import annotations

import os

import torch

from memopt.torch_compat import source_files
from memopt.torch_compat.dynamo import own_frames


def test_the_files_are_there() -> None:
    for path in (*source_files.AROUND_CALLS, *source_files.COMPILER, *own_frames()):
        assert os.path.exists(path), path


def test_what_compiles_lies_there_and_operators_do_not() -> None:
    assert torch._dynamo.__file__.startswith(source_files.COMPILER)
    assert not torch.nn.functional.__file__.startswith(source_files.COMPILER)
