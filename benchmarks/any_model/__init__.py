"""What the code around the layers costs that runs on every stage."""
