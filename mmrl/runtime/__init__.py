"""Processes, sharding, checkpoint files and signals."""
