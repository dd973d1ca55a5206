"""Policies of flow models; a step is a denoising step or a random draw of a matching loss."""
