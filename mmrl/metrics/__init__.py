"""Metrics: from a reward table to named numbers."""
