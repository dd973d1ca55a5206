"""Memory estimates of the policies and engines of text."""
