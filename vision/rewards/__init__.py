"""Rewards of what was seen."""
