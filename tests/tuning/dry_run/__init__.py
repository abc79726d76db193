"""Tests of `lightning_hybrid/tuning/dry_run`."""
