"""Checks of image models at the start of a run."""
