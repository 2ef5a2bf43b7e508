"""The reports that a user asks for: summary and diagnostics."""
