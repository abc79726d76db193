"""What the strategy costs where nothing is divided."""
