"""Published benchmarks: their files and official metrics."""
