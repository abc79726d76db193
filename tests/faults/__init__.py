"""Faults injected at random moments of real runs: what every rank says, and how long it takes until all have ended."""
