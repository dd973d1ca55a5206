"""Builders of data sets and of small models, for `mmrl build`."""
