"""Examples: plain LightningModules, and the data they learn from."""
