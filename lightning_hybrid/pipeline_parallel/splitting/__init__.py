"""Splitting of batches into microbatches: contents of a batch, ready-made splitters, and warnings."""
