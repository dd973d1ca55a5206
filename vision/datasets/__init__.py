"""Readers: files to prompts."""
