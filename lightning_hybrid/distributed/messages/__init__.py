"""Messages of the host between ranks, and broadcasts of trees of values that use these messages."""
