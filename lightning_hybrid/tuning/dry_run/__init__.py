"""A run up to its first training step on shapes alone: what the step saves, computes and sends."""
