"""What the optimizer tells its user: summary, diagnostics, warnings."""
