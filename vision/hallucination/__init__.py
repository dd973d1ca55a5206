"""Hallucination without a judge: what an answer mentions, against what is known to be in the picture."""
