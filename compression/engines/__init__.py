"""Engine wrappers that check and time compressed caches and transformed models."""
