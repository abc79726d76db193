"""The watch of a rank: a thread that writes what the rank does, reads what others do, and ends it after a failure."""
