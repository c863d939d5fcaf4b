"""Training objectives, the local training loop, and the scores of trained models."""
