"""What the optimizer reports to its user when asked: summary and diagnostics."""
