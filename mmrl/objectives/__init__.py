"""Objectives, and the pieces they are built from: surrogates, comparisons, penalties and weights."""
