"""Tensor parallelism in 2, 2.5 and 3 dimensions: activations and weights are sharded in blocks over a grid of ranks."""
