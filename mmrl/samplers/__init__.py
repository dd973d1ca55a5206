"""Samplers choose the prompts of a training step and repeat them into groups."""
