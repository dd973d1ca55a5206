"""Environments that a policy acts in, as classes in the form of TRL."""
