"""Programs under XLA: ATen graphs as JAX functions, portable StableHLO artifacts, and compiled executables.

Nothing here is imported by the rest of memopt until it is asked for: it needs the extra `memopt[xla]`.
"""
