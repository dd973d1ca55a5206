"""Data types, tables and protocols that every other package uses; depends on torch only."""
