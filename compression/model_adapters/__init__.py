"""Adapters of vision-language model families, through which visual-token pruning reads the models."""
