"""Transforms: functions that turn a model into a cheaper one (pruned, quantised, cast)."""
