"""Links between pipeline ranks: message times, extra microbatches in flight, and traffic between nodes."""
