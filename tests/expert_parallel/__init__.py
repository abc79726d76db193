"""Tests of `lightning_hybrid/expert_parallel`."""
