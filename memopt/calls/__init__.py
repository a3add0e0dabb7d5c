"""The calls of one model: planned where they are new, run as planned, eagerly, or refused."""
