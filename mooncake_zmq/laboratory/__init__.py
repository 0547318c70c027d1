"""Replay of traces through the cluster's own actors in virtual time, and comparison of policies and sizes."""
