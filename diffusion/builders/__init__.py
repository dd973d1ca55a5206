"""Builders of small CLIP and flow models for tests and demos."""
