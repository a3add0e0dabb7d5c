"""Where memopt's own code lies."""

import os
from pathlib import Path

import memopt
from memopt.common.own_files import MEMOPT
from memopt.passes import inplace


def test_all_rooms_lie_in_one_folder():
    files = [memopt.__file__, inplace.__file__]
    assert os.path.isdir(MEMOPT) and all(os.path.abspath(file).startswith(MEMOPT) for file in files)
    assert not str(Path(__file__)).startswith(MEMOPT)
