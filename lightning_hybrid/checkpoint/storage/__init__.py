"""Storage of checkpoints on disks and object stores, where only complete checkpoints are visible."""
