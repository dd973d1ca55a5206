"""Checks of data sets with pictures and clips."""
