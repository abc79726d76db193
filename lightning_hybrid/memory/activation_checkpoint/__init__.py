"""Activation checkpointing: activations are recomputed in backward instead of saved."""
