"""Checks of data, of the first step of a run and of its metrics: what is wrong and what to do."""
