"""Planning one step: what is kept, recomputed or offloaded within a limit, trial steps, warm starts."""
