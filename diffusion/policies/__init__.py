"""Policies of flow models; a step is a denoising step, or a random time and noise of a matching loss."""
