"""Tests of `lightning_hybrid/strategy`."""
