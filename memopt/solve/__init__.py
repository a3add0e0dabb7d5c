"""Solvers: plain numbers in, plain numbers out, no torch; beside each one an independent checker of its answers."""
