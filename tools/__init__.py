"""The `nexuskv` command and its benchmarks."""
