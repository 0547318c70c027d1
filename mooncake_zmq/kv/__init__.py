"""Blocks of KV cache: their layout, hash keys, checksums and leases. Pure."""
