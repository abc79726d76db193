"""Tests of `lightning_hybrid/pipeline_parallel`."""
