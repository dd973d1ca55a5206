"""Triton kernels of matrix products with packed codes, for CUDA."""
