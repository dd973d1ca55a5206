"""Schedules: numbers that change during a run, as functions of the clock."""
