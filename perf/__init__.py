"""Benchmarks of speed and memory. They print tables, and give ratios; no test depends on their times."""
