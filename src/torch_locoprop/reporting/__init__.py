"""What the optimizer reports to its user: summary, diagnostics and warnings."""
