"""Checks of training while it runs: equal steps on all ranks, finite values and gradients, half precision."""
