"""Likelihoods of flow models: each defines a training step and its log-likelihood."""
