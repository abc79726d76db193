"""Losses over microbatches: how they relate to the loss of the full batch, and the weight of each microbatch."""
