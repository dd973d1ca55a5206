"""Engines that make pictures and videos."""
