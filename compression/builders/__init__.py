"""Builders of `mmrl build` for compressed models."""
