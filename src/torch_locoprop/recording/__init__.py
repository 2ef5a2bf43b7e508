"""Records what a step needs of forward and backward passes, and detects the layers' transfers."""
