"""What steps give back on one stage, made the same on every rank: logs, metrics, outputs, attributes, logger calls."""
