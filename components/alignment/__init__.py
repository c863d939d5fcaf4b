"""Alignment of the policy by the server: labels for sampled pairs, DPO, and trees of thoughts."""
