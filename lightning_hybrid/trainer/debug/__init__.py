"""Faults of training that are found while it runs: ranks that differ, values that are not finite."""
