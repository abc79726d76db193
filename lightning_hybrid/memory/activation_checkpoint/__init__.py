"""Activations that are computed again in backward instead of being kept."""
