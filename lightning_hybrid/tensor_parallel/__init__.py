"""Tensor, sequence and context parallelism: plans, styles, parallel layers, and losses over sharded classes.

Parameters are DTensors, so that optimizers, norms and checkpoints know every shard. Activations stay plain tensors.
"""
