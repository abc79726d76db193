"""Choice of a layout: estimates of step time and memory without devices, and a search for the fastest that fits."""
