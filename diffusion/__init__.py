"""Flow-matching image and video models."""
