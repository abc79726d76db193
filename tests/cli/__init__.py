"""Tests of `lightning_hybrid/cli`."""
