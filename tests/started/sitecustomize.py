"""Brief searches in the processes that a test starts, too: see `brief_searches` of tests/planning.py.

Python imports this module as it starts, before anything else, where the folder is on its path.
"""

import importlib.machinery
import os
import sys


class _Brief:
    """Finds the module of the search as ever, and lowers its counts once it is loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "memopt.solve.recompute":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def brief(module):
                load(module)
                module.EFFORT, module.PATIENCE = map(int, os.environ["BRIEF_SEARCHES"].split(","))

            spec.loader.exec_module = brief
        return spec


if "BRIEF_SEARCHES" in os.environ:
    sys.meta_path.insert(0, _Brief)
