"""Checkups that know what is special about this package."""
