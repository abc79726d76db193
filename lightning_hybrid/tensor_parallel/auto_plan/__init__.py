"""The plan that nobody has to write: of torch's layers, of a model's own plan, and of blocks that are recognised."""
