"""Finds out what running vLLM servers are, and writes and starts a deployment over them."""
