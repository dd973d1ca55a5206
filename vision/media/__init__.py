"""Prompts with media: construction, corrupted images, and writing datasets with media files."""
