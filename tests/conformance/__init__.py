"""Lightning's own tests, run with `HybridStrategy`."""
