"""Time to the first step."""
