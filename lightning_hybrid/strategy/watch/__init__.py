"""The watch thread of a run: its checks, and the agreement of ranks about signals."""
