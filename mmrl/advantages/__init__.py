"""Advantage functions, from reward table to reward table; a chain of them, in order, defines a method."""
