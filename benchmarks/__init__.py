"""Programs that measure; one folder per question."""
