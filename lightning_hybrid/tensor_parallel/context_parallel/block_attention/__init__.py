"""Attention that is computed block by block, with gathered keys or with keys that are sent from rank to rank."""
