"""Training loops of other libraries under a budget, measured to the end of their epochs."""
