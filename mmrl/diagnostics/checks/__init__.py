"""Checkups: a small collection of a run to what is wrong with it, and what to do."""
