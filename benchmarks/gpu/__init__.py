"""The questions that only a GPU answers, in one script with a time budget."""
