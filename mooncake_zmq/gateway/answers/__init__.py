"""Answers that were given before, kept at the gateway: off by default."""
