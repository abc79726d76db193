"""Trees of values from one rank to others of its group, and only what these read."""
