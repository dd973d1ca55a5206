"""Caches of keys and values that use less memory than the model's own cache."""
