"""The strategy that Lightning calls, and how a run is put together: checks, layout, parallelized module, launch."""
