"""Data sets: readers that turn files into prompts."""
