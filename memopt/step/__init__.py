"""Planning one step: what is kept and recomputed, within a limit, tried, measured and found again."""
