"""The verdict on a run: what each rank waits for and where it is, and the judge who reads all records."""
