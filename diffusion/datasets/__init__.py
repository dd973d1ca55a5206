"""Data sets of prompts, and of recorded images and videos with scores."""
