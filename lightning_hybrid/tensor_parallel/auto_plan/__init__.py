"""The automatic plan: for torch's layers, for Hugging Face models with a plan, and for common blocks."""
