"""Samplers that change the media of prompts."""
