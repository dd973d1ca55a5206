"""Rollout engines for image and video models."""
