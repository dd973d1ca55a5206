"""Likelihoods of flow models: what one training step is, and its log-likelihood."""
