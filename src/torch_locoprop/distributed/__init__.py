"""Training one model with several processes."""
