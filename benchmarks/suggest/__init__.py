"""Whether `lightning-hybrid suggest` puts layouts in the order in which they run."""
