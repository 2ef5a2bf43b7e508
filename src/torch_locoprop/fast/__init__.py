"""Faster ways to the numbers of the plain solvers."""
