"""Long sequences shared by ranks: each computes layers for its share of the positions, and attention communicates."""

import lightning_hybrid.tensor_parallel.context_parallel.cross_entropy  # noqa: F401  registers losses of sequences in shares
