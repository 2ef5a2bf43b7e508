"""The local step: builds each layer's problem from its record, solves it, applies the solution."""
