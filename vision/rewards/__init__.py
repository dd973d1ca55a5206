"""Rewards for answers about images and videos."""
