"""Context parallelism: each rank computes layers for its sequence shard, and attention communicates."""

import lightning_hybrid.tensor_parallel.context_parallel.cross_entropy  # noqa: F401  registers losses of sharded sequences
