"""Builds KV for prompts and the first token. Pure."""
