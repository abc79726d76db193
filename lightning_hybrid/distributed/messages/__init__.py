"""Messages of the host between ranks, and by these trees of values from one rank to others of its group."""
