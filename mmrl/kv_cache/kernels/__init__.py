"""Products with packed codes, which are never written out as numbers: Triton on CUDA, torch elsewhere."""
