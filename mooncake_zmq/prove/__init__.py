"""Proof that an engine gives the same tokens with KV that was stored and restored as with KV that it computes."""
