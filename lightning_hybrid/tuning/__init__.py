"""Which layout: what a step of each would take and hold, found out without devices, and the best of those that fit."""
