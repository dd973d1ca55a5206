"""Data sets around other data sets."""
