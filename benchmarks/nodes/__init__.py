"""Steps between machines that are far apart."""
