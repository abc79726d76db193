"""Results of steps that exist on one stage and are sent to every rank: logs, metrics, outputs, attributes."""
