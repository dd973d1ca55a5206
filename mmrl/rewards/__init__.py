"""Rewards that know nothing of a modality. A reward measures all outcomes of a collection at once."""
