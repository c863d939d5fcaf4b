"""Prefect tasks: every side effect of the pipeline is one small task."""
