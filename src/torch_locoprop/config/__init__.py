"""Settings of the optimizer: their checks, groups and components."""
