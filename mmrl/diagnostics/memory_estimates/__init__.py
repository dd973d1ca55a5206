"""Estimates: a configuration, its policy and some prompts to bytes by what takes them."""
