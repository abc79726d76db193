"""Doing a step again whose path has changed."""
