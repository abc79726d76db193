"""Output of `lightning-hybrid suggest`: the layouts that were found, and the values from the configuration."""
