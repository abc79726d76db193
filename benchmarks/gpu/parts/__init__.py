"""One module for each kind of question; the table of parts is in `benchmarks.gpu.table`."""
