"""What a thread beside a run sees: where the run is, what it waits for, which processes have ended."""
