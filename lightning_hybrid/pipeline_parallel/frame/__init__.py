"""The cut of any model: its units are divided into stages, its own code around them runs on each of them."""
