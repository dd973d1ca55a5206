"""Engines: they make rollouts, or wrap another engine."""
