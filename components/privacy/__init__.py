"""Differential privacy: what is released, what it costs, and the noise of each mechanism."""
