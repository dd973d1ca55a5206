"""Visualizations of media and answers, for the HTML report."""
