"""How long the whole step takes: `HybridStrategy` in a Trainer against a loop written by hand."""
