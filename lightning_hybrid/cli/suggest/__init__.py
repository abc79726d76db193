"""Which layout: what a step of each would take and hold, and the best of those that fit."""
