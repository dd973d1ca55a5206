"""Costs of an engine that generates text."""
