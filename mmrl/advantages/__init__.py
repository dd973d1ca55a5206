"""Advantage functions: each maps a reward table to a reward table; a chain of them defines a method."""
