"""What layers cost that are shared by several ranks."""
