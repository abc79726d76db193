"""Processes and what they exchange: mesh, process groups, broadcasts of trees, agreement, failure, random numbers.

Nothing here knows of pipelines, layers or Lightning.
"""
