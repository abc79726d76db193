"""Losses over microbatches: what they are of their batch, and what each microbatch counts."""
