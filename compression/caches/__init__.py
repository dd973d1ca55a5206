"""Caches of keys and values that are smaller than the model's own."""
