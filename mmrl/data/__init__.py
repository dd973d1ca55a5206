"""Reading and writing datasets on disk, and opening their media safely."""
