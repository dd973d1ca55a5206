"""Checks of data sets: what `mmrl data check` looks for. Signature: (rows) -> findings."""
