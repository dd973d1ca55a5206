"""Memory estimates of the policies and engines of images."""
