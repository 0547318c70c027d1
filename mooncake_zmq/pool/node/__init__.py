"""One host's pool of KV blocks."""
