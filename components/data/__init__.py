"""Preference records, their sources, partitions, templates and validation."""
