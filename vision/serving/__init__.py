"""Sampling from vLLM servers: requests, servers, weights, and the command lines that start servers."""
