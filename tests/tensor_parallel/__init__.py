"""Tests of `lightning_hybrid/tensor_parallel`."""
