"""One runtime for prompts that are computed once and for quantised key-value caches."""
