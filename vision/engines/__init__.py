"""Engines that answer in tokens."""
