"""Policies of flow models; a training step is a denoising step, or a matching loss at a random time."""
