"""Configuration files: schema, loading, the registry of pieces, and binding names to functions."""
