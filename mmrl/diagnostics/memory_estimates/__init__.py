"""Memory estimates: from a configuration, its policy and some prompts to bytes by part."""
