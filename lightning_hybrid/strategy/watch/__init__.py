"""The thread beside a run: what it looks at, and what it does about signals."""
