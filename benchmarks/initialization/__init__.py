"""What memory a rank needs to start."""
