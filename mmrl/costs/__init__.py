"""Costs of an engine while it answers, besides seconds."""
