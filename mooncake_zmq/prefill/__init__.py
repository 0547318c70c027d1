"""Prefill nodes, which build the KV of prompts and the first token. Pure."""
