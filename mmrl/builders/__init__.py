"""Builders for `mmrl build` that work for models of any modality."""
