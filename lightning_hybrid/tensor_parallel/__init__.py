"""Layers, sequences and losses over classes, sharded over ranks; and the plans and styles that say how.

Parameters are DTensors, so that optimizers, norms and checkpoints know every shard; activations stay plain tensors.
"""
