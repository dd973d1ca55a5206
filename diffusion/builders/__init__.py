"""Builder of a small flow model for tests and demos."""
