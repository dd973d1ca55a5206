"""Engines whose answers are sequences of tokens."""
