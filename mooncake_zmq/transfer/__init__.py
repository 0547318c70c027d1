"""Moves KV bytes: shared memory, network, CUDA."""
