"""Policies whose steps are the tokens of an answer."""
