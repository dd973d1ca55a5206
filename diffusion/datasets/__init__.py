"""Data sets for flow-matching models."""
