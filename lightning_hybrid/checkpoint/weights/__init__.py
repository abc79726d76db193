"""Weights of another training, or of a model of Hugging Face: where they come from, and which rank reads what."""
