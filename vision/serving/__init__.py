"""Rollouts by vLLM servers: the requests, the servers and their weights, and the command that starts them."""
