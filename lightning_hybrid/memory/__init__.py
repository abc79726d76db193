"""Where the bytes of a rank go, and how they get fewer: activation checkpointing, offload, the account."""
