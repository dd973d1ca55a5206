"""Rewards of pictures and clips."""
