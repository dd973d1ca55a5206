"""Samplers: they choose the prompts of a collection and repeat them into groups."""
