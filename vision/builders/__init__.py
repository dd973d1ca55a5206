"""Builders of data sets and of small models, used by `mmrl build`."""
