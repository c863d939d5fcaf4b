"""Benchmarks of speed and memory. They print tables; no test depends on their times."""
