"""Checks of data, of a run's first step and of its metrics; findings state the fault and what to do."""
