"""What `lightning-hybrid suggest` says of the layouts that are found, and what a configuration says beside them."""
