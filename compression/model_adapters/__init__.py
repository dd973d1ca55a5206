"""Adapters of vision-language model families for pruned visual computation."""
