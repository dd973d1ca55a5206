"""Prompts to make pictures and clips of, and pictures that somebody made of prompts."""
