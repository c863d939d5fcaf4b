"""Backbones, adapters and the models that are made of them."""
