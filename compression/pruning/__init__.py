"""How a model runs with less visual computation."""
