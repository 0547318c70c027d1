"""Decode nodes, which produce the tokens after the first in a continuous batch. Pure."""
