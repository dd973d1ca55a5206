"""Visualizations of a report: grids of images, and trajectories with their turning points."""
