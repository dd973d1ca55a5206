"""A folder on the PYTHONPATH of vLLM servers, because mmrl is not installed in their environment."""
