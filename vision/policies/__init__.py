"""Policies whose steps are tokens."""
