"""Transforms of vision-language models."""
