"""Transforms: functions that convert a model into a cheaper one (pruned, quantised, cast)."""
