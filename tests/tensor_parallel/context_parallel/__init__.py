"""Tests of `lightning_hybrid/tensor_parallel/context_parallel`."""
