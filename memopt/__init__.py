"""memopt: say how much memory you have; memopt makes your model fit, with the least slowdown, and proves it."""

__version__ = "0.1.0"
