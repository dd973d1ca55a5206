"""Functions that turn rewards per answer into advantages; applied in sequence they define a method."""
