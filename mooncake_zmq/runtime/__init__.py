"""Actors, sessions and the ZeroMQ runtime that drives them."""
