"""Builders that know no modality, for `mmrl build`."""
