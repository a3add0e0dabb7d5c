"""Where memopt's own code lies."""

import contextlib
import os
from pathlib import Path

import pytest

import memopt
from memopt.common.own_files import MEMOPT, is_pythons
from memopt.passes import inplace


def test_all_rooms_lie_in_one_folder():
    files = [memopt.__file__, inplace.__file__]
    assert os.path.isdir(MEMOPT) and all(os.path.abspath(file).startswith(MEMOPT) for file in files)
    assert not str(Path(__file__)).startswith(MEMOPT)


def test_what_is_installed_is_none_of_pythons_own_files():
    assert is_pythons(contextlib.__file__)
    assert not any(map(is_pythons, (pytest.__file__, memopt.__file__, __file__)))
