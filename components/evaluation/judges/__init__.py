"""Judges, which say which of two responses is better; JUDGES (components/config) names them."""

from components.evaluation.judges.autoj_verdict import parse_autoj

__all__ = ["parse_autoj"]
