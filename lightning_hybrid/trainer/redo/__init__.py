"""Repeated steps: a training step runs again if its path through the model differs from its plan."""
