"""Checks of data with images and videos, and of the models that see them."""
