"""The verdict on a run: what each rank waits for, where it is, and the judgment of all records."""
