"""Exact resume: a resumed run equals the uninterrupted run in loops, data, logged values and random numbers."""
