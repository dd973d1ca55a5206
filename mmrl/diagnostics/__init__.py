"""Checks of configurations, data and runs, and memory estimates."""
