"""Backbones, adapters, and the models that consist of them: selector, policy, rewards."""
