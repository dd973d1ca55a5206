"""What `mmrl build` makes for cheaper models."""
