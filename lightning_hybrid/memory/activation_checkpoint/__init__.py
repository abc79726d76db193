"""Activations that are recomputed in backward instead of being saved."""
