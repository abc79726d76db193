"""Tests of `lightning_hybrid/tuning`."""
