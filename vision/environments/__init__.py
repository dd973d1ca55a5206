"""Environments in which a policy acts, as classes with the interface of TRL."""
