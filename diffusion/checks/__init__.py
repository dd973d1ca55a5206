"""Checks that text reaches the image model."""
