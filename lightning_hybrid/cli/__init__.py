"""The program ``lightning-hybrid``."""
