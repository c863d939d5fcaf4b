"""Reward models, which score responses or compare the two responses of a pair."""
