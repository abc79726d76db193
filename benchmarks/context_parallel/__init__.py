"""What long sequences cost that are shared by several ranks."""
