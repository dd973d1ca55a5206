"""Policies over latents, whose steps are denoising steps or draws of a matching loss."""
