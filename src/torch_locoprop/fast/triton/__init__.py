"""Fast paths. Each equals, to rounding, the plain version that it stands beside."""
