"""Whether all ranks do the same, and where they stand when nothing happens any more."""
