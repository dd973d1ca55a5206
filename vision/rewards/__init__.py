"""Rewards of answers about images and videos."""
