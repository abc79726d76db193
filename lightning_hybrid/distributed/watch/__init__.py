"""The thread beside a run, and what it sees: where the run is, what it waits for, which processes have ended."""
