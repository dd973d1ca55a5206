"""Estimates of the memory that this package's policies and engines take."""
