"""A run that continues from a checkpoint as the rest of the uninterrupted one: loops, data, logs, random numbers."""
