"""Inference: look up models, answer questions, and export models."""
