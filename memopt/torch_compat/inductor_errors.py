"""What Inductor raises for a graph that it has no code for; tried on 2.11 and 2.13."""

from torch._inductor.exc import InductorError as InductorError
