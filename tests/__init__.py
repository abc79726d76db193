"""Tests of `lightning_hybrid`."""
