"""The search for a method's settings: spaces, trials, and the folder that keeps them."""
