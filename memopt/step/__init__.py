"""Planning one step: what is kept and computed again, within a limit, tried, measured and found again."""
