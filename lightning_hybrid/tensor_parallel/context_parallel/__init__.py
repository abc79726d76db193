"""Long sequences shared by ranks: each computes layers for its share of the positions, and attention communicates."""

import lightning_hybrid.tensor_parallel.context_parallel.cross_entropy
import lightning_hybrid.tensor_parallel.context_parallel.sequence_ops  # noqa: F401  both register what sequences in shares can do
