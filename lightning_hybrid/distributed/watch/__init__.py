"""The watch of a rank: a thread that publishes the rank's state, reads other states, and ends it after a failure."""
