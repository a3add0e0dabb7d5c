"""A step small enough to count by hand: two layers, their backward, every kind of storage."""

from memopt.solve.problem import StepProblem

# Operations: 0 makes A from X, 1 makes B from A (workspace 3), 2 makes G from B and T, 3 makes H from A and G.
X, A, B, T, G, H = range(6)
STEP = StepProblem(
    sizes=(1000, 10, 20, 4, 5, 7),
    reads=((X,), (A,), (B, T), (A, G)),
    writes=((A,), (B,), (G,), (H,)),
    costs=(1.0, 2.0, 4.0, 8.0),
    workspace=(0, 3, 0, 0),
    forward=2,
    recomputable=(True, True, False, False),
    pinned=frozenset({H}),
    resident=frozenset({X}),
    arriving=frozenset({T}),
)
KEEP_ALL = (0, 1, 2, 3)
REMAKE_A = (0, 1, 2, 0, 3)
