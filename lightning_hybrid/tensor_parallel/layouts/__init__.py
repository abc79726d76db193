"""Layouts of the user's own: how a value or a parameter lies over the ranks, axis by axis."""
