"""Tests of `lightning_hybrid/trainer/results`."""
