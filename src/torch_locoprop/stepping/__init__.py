"""From what was recorded to new weights."""
