"""Dashboards: where a run's numbers go besides its own journal."""
