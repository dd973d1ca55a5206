"""Checks of data, of the first step of a run and of metrics; findings state the fault and advice."""
