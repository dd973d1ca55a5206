"""Inference: find the model that a user names, answer questions, and export models."""
