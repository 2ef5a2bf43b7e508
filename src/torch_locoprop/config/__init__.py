"""The settings of the optimizer: the table of them, presets, checks, parameter groups, components."""
