"""Tests of `lightning_hybrid/data_parallel`."""
