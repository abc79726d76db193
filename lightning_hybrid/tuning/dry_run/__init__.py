"""A run up to its first training step on fake tensors, and a record of this step: memory, operations, messages."""
