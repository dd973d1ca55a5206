"""A folder for the PYTHONPATH of vLLM servers, whose environment has no mmrl."""
