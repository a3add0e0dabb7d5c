"""Training steps captured as CUDA graphs: how they run, where their blocks lie, and whether one is worth it."""
