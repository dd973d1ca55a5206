"""Prefill and token-by-token decoding of vision-language models."""
