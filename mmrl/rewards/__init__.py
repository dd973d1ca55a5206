"""Rewards that work with any modality. A reward scores all outcomes of a sampling round at once."""
