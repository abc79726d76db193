"""Tests of `lightning_hybrid/context_parallel`."""
