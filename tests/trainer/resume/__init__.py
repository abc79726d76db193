"""Tests of `lightning_hybrid/trainer/resume`."""
