"""Objectives and the local training loop."""
