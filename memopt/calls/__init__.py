"""The calls of one model: planned where they are new, run as planned, as they are, or refused."""
