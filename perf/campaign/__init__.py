"""A campaign: benchmarks whose runs take hours, worked through in the background one run at a time."""
