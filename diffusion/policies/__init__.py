"""Policies of latents: a step is a choice on the way from noise to a picture."""
