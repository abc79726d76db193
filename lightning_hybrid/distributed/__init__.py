"""Ranks and their communication: mesh, process groups, messages, agreement, failures and random numbers.

This package knows nothing about pipelines, layers or Lightning.
"""
