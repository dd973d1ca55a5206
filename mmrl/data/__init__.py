"""Reading and writing data sets on disk."""
