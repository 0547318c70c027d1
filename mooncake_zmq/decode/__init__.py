"""Produces the later tokens in a continuous batch. Pure."""
