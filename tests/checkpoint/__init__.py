"""Tests of `lightning_hybrid/checkpoint`."""
