"""Runtime for prompts that are computed once for many rows, and for quantised key-value caches."""
