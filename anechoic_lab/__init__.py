"""What produced our numbers: the grids of the paper and of our studies, their records and pages, and the benchmarks."""
