"""Solvers: plain numbers in, plain numbers out, no torch; what judges their answers alone is in tests/solve."""
