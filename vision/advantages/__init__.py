"""Advantage functions for media: what an answer owes to the order of frames."""
