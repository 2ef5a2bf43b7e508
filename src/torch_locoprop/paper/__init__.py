"""The equations of the paper: pure functions and small classes of tensors.

This package imports torch and nothing else of torch_locoprop. ``docs/equations.md`` lists every
numbered equation, algorithm, proposition, table and figure of the paper with the object that
implements it.
"""
