"""Expert parallelism: replicas share the experts of a mixture of experts, and exchange the tokens."""
