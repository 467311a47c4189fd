"""What all benchmarks share: paths, results files, measuring processes."""
