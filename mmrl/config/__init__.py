"""Configuration files: schema, loading, the registry of pieces, and binding names to functions."""

from mmrl.config.loading import SHORTHANDS
from mmrl.config.trl_arguments import applied

SHORTHANDS["trl"] = applied
