"""Attention block by block: with keys that are gathered, or that pass from rank to rank."""
