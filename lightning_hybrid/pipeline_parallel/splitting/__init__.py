"""How batches are split: what is in them, ready-made splitters, and what users are told."""
