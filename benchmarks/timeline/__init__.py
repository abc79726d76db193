"""What recording a step with `HybridTimeline` costs."""
