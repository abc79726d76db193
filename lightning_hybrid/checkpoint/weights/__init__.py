"""Weights of an earlier training or of a Hugging Face model: finding them, and reading the part of each rank."""
