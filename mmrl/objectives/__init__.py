"""Objectives and their pieces: surrogates, comparisons, penalties and weights."""
