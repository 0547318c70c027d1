"""Replays traces through the cluster's own actors in virtual time, and compares policies and sizes."""
