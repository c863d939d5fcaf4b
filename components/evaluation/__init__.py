"""Evaluation: judges, win rates, accuracies, overlap with human texts, answers, and plots."""
