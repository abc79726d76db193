"""Expert parallelism against replicas that each have all experts: time, and bytes of the training state."""
