"""Tests of `lightning_hybrid/memory`."""
