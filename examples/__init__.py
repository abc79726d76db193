"""Examples: ordinary LightningModules and their training data."""
