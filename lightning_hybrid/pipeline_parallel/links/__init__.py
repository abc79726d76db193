"""Links between ranks: what a message takes on them, and how many microbatches are to be on their way over each."""
