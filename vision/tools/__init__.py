"""Tools that a model may call in a conversation."""
