"""Transforms: from a model to a cheaper one."""
