"""Data sets that work for any modality."""
