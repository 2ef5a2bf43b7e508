"""Local problems that several processes solve together: what they tell each other, who solves what."""
