"""Adapters that give visual-token pruning a uniform view of vision-language model families."""
