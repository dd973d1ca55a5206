"""Group filters: from a reward table to (N,) bool, False for every row of a dropped group."""
