"""Prefect flows, nothing else."""
