"""Fast paths: they compute what the plain solvers compute, to rounding, in less time."""
