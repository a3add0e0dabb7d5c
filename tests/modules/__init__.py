"""Random models and the loops that use them, as source: written, run in eager and on an engine, compared, cut down."""
