"""Tests of `lightning_hybrid/distributed`."""
