"""What forward and backward passes leave behind for a step."""
