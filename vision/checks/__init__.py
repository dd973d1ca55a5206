"""Checks of data sets with images and videos, and of vision-language models."""
