"""Experimental cache formats of our own."""
