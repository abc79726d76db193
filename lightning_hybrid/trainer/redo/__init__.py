"""Repeats a step whose path through the model has changed."""
