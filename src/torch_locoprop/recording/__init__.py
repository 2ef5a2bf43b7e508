"""Hooks that record what forward and backward passes leave for a step, and where transfers are."""
